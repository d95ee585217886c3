"""docs/sglang.md says what the code checks."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from ddtree.sglang_plugin import contract, metrics

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_sglang_docs.py"


def test_the_tables_are_current():
    spec = spec_from_file_location("make_sglang_docs", SCRIPT)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.render(page), "run: python scripts/make_sglang_docs.py"
    assert "| `node_budget` | `31` |" in page
    assert "| torch_native | no | no | has no tree mask |" in page


def test_every_metric_is_described():
    page = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    source = Path(metrics.__file__).read_text(encoding="utf-8")
    counters = {f"ddtree_{name}_total" for name in re.findall(r'counter\(\s*"(\w+)"', source)}
    described = set(re.findall(r"^\| `(ddtree_\w+)", page, flags=re.MULTILINE))
    assert described == counters | {"ddtree_verify_width"}


def test_how_to_check_a_release_is_described():
    page = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert f"{contract.ALLOW_UNTESTED}=1" in page
    assert "ddtree doctor --sglang-wheel" in page
    assert set(re.findall(r"`make ([a-z-]+)`", page)) <= set(targets)
    assert "`make contract`" in page
    assert f"{contract.FIRST_TESTED} to {contract.LAST_TESTED}" in page
