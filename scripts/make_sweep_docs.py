"""Writes the tables and plots of docs/bench.md from the runs under results/: no figure is typed by hand.

python scripts/make_sweep_docs.py

A run is a file `results/sweep_*.jsonl` of `ddtree bench`; with none there, the page says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddtree.bench.document import Block, code, escaped, markdown_blocks
from ddtree.bench.published import published_blocks
from ddtree.bench.recommendation import markdown, recommend
from ddtree.bench.report import failed_arms, run_in_short
from ddtree.bench.run_format import Run, read_run
from ddtree.bench.summary import summarise
from ddtree.bench.tables import commands, comparison_tables, fastest_table

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, IMAGES = ROOT / "results", ROOT / "docs" / "bench.md", ROOT / "docs" / "images"
BEGIN_SWEEPS, END_SWEEPS = "<!-- sweeps: made by scripts/make_sweep_docs.py -->", "<!-- end of sweeps -->"
BEGIN_PUBLISHED = "<!-- published figures: made by scripts/make_sweep_docs.py -->"
END_PUBLISHED = "<!-- end of published figures -->"
SHOWN = {
    "budget": "Speed-up over plain decoding and accept length over node budget",
    "lengths": "Share of rounds by accept length",
    "stages": "Milliseconds of a round by stage",
}
NONE = "No sweep is stored under `results/` yet."


def page(text: str, results: Path = RESULTS, images: Path = IMAGES) -> str:
    """The page with what stands between its markers made anew; it shows the pictures that are there."""
    paths = sorted(results.glob("sweep_*.jsonl"))
    sweeps = "\n\n".join(part for path in paths for part in sweep(path, images))
    text = between(text, BEGIN_SWEEPS, END_SWEEPS, sweeps or NONE)
    return between(text, BEGIN_PUBLISHED, END_PUBLISHED, "\n\n".join(markdown_blocks(published_blocks())))


def between(text: str, begin: str, end: str, made: str) -> str:
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end, 1)[1]}"


def sweep(path: Path, images: Path) -> Iterator[str]:
    """A run's part of the page."""
    run = stored(path)
    rows = summarise(run)
    yield f"### {escaped(path.stem.removeprefix('sweep_').replace('_', ' '))}"
    yield f"{run_in_short(run)}. From {code(run.source)}, measured by {'; '.join(map(code, commands(run)))}."
    blocks: list[Block] = [*failed_arms({"": run}), fastest_table(rows)]
    yield from markdown_blocks(blocks)
    for kind, alt in SHOWN.items():
        names = sorted(picture.name for picture in images.glob(f"{picture_stem(path)}-{kind}-*.svg"))
        yield from (f"![{alt}](images/{name})" for name in names)
    yield "#### What to set"
    yield markdown(recommend(run), "#####").strip()
    yield "#### Every arm"
    yield from markdown_blocks(comparison_tables(rows, only_measured=True))


def stored(path: Path) -> Run:
    """The run, called by its place in the repository."""
    run = read_run(path)
    run.source = f"results/{path.name}"
    return run


def picture_stem(path: Path) -> str:
    return path.stem.replace("_", "-")


def write_pictures(folder: Path = IMAGES, results: Path = RESULTS) -> None:
    """Write every run's pictures, and take away those of runs that are gone."""
    from ddtree.bench.plots import report_pictures

    for old in folder.glob("sweep-*.svg"):
        old.unlink()
    for path in sorted(results.glob("sweep_*.jsonl")):
        for made in report_pictures(summarise(read_run(path))):
            if made.name.startswith(tuple(SHOWN)):
                (folder / f"{picture_stem(path)}-{made.name}.svg").write_text(made.svg, encoding="utf-8")


if __name__ == "__main__":
    write_pictures()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
