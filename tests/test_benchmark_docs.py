"""docs/benchmarks.md says what the results files say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_page_is_current():
    module = runpy.run_path(str(ROOT / "scripts" / "make_benchmark_docs.py"))
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written == module["page"](), "run python scripts/make_benchmark_docs.py"
