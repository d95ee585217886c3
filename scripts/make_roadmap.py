"""Writes the generated parts of sglang-ddtree-roadmap.md and its pictures from code, settings and results.

python scripts/make_roadmap.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import roadmap_checks
import roadmap_knobs
import roadmap_performance
import roadmap_plots
import roadmap_start
import tensor_parallel_docs

ROOT = Path(__file__).parents[1]
PAGE, IMAGES = ROOT / "sglang-ddtree-roadmap.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- {}: made by scripts/make_roadmap.py -->", "<!-- end of {} -->"

PARTS: Mapping[str, Callable[[], str]] = {
    "start": roadmap_start.start,
    "knobs": roadmap_knobs.all_knobs,
    "tensor parallel": tensor_parallel_docs.roadmap,
    "measured in SGLang": roadmap_performance.measured_sglang,
    "measured in the engine": roadmap_performance.measured_embedded,
    "accept lengths": roadmap_performance.lengths,
    "the paper": roadmap_performance.paper,
    "ceilings": lambda: "\n\n".join(roadmap_performance.ceilings()),
    "fits": roadmap_checks.fits,
    "checks": roadmap_checks.checks,
    "speed-ups": roadmap_checks.checked_speed_ups,
    "predictions": roadmap_performance.predictions,
    "costs": roadmap_performance.costs_in_steps,
    "losses": roadmap_performance.losses,
}


def render(page: str) -> str:
    """The page with its parts made anew.

    Raises:
        SystemExit: a part has no place on the page.
    """
    for name, make in PARTS.items():
        begin, end = BEGIN.format(name), END.format(name)
        if page.count(begin) != 1 or page.count(end) != 1:
            raise SystemExit(f"{PAGE.name} needs the lines {begin!r} and {end!r} once each")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{make()}\n{end}{rest.split(end, 1)[1]}"
    return page


def pictures() -> dict[Path, str]:
    """The text of every picture by its file."""
    return {IMAGES / name: draw() for name, draw in roadmap_plots.PICTURES.items()}


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
