"""docs/bench.md says what the stored runs and the published figures say."""

import runpy
from pathlib import Path

import pytest

from report_kit import made_up_run, write_run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "make_sweep_docs.py"))


@pytest.fixture
def empty(script):
    """A page with nothing between its markers."""
    names = ("BEGIN_SWEEPS", "END_SWEEPS", "BEGIN_PUBLISHED", "END_PUBLISHED")
    return "before\n" + "\n".join(script[name] for name in names) + "\nafter\n"


def test_the_page_is_current(script):
    written = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    assert written == script["page"](written), "run python scripts/make_sweep_docs.py"


def test_pictures_are_those_of_stored_runs(script):
    stems = {script["picture_stem"](path) for path in (ROOT / "results").glob("sweep_*.jsonl")}
    shown = {picture.name for picture in (ROOT / "docs" / "images").glob("sweep-*.svg")}
    assert all(any(name.startswith(f"{stem}-") for stem in stems) for name in shown)
    assert all(any(name.startswith(f"{stem}-budget-") for name in shown) for stem in stems)


def test_without_a_run_the_page_says_so(script, empty, tmp_path):
    made = script["page"](empty, tmp_path, tmp_path)
    assert script["NONE"] in made
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    assert script["page"](made, tmp_path, tmp_path) == made


def test_each_run_has_its_part(script, empty, tmp_path):
    for name, arms in (
        ("sweep_cpu_fp32", ("embedded ar", "embedded tree:4")),
        ("sweep_h200", ("embedded ar",)),
    ):
        run = made_up_run(arms=arms, sets=("gsm8k",), temperatures=(0.0,), repeats=1, prompts=2)
        write_run(tmp_path / f"{name}.jsonl", run)
    (tmp_path / "sweep-h200-budget-t0-c1.svg").write_text("<svg/>")
    made = script["page"](empty, tmp_path, tmp_path)
    assert script["NONE"] not in made
    assert made.index("### cpu fp32\n") < made.index("### h200\n")
    assert "From `results/sweep_h200.jsonl`, measured by `ddtree bench --engine embedded" in made
    assert "(images/sweep-h200-budget-t0-c1.svg)" in made.split("### h200\n")[1]
    assert made.count("\n| embedded tree:4 |") == 1
    assert "outputs as plain" in made


def test_pictures_are_written_and_old_ones_go(script, tmp_path, monkeypatch):
    from ddtree.bench import plots
    from ddtree.bench.document import Picture

    made = [Picture(name, "", "", f"<svg>{name}</svg>", b"") for name in ("budget-t0-c1", "depth-1-x")]
    monkeypatch.setattr(plots, "report_pictures", lambda rows: made)
    write_run(tmp_path / "sweep_a_b.jsonl", made_up_run(arms=("embedded ar",), sets=("gsm8k",), repeats=1))
    (tmp_path / "sweep-gone-budget-t0-c1.svg").write_text("old")
    script["write_pictures"](tmp_path, tmp_path)
    assert [path.name for path in tmp_path.glob("*.svg")] == ["sweep-a-b-budget-t0-c1.svg"]
