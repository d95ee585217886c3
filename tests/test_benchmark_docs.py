"""docs/benchmarks.md and the README say what the results files say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pages_are_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = runpy.run_path(str(ROOT / "scripts" / "make_benchmark_docs.py"))
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written == module["page"](), "run python scripts/make_benchmark_docs.py"
    assert (ROOT / "README.md").read_text(encoding="utf-8") == module["readme"]()
