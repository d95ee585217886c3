"""docs/cli.md is what the commands say."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_cli_docs.py"


def test_the_page_is_current():
    spec = spec_from_file_location("make_cli_docs", SCRIPT)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.render(), "run: python scripts/make_cli_docs.py"
    assert "`--stop-token-id` ID" in page
