"""How the report's plots look, and how they become SVG and PNG: the same bytes at every run."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtree.bench.document import Picture
from ddtree.bench.run_format import Arm
from ddtree.config import Mode
from ddtree.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours without the yellow, which white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*X"
TREE_MARKERS = "oD^vP"  # apart from the chain's square and auto's star
LINES = ("-", "--", "-.", ":")
HATCHES = ("", "///", "...", "\\\\\\", "xx", "++", "oo")
PLAIN, CHAIN, AUTO = "#767676", "#D55E00", "#CC79A7"
# From dark to light, readable on white up to its end.
TREES = ("#0d2149", "#1b4079", "#2f6aa8", "#4d92c6", "#79b4d9", "#a3cfe8")
GREY = "#767676"
MAX_LABEL = 36
MAX_COLUMNS = 3
PANEL_INCHES = (4.2, 3.3)
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.dpi": 100,
    "font.size": 9,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.markersize": 5,
    "svg.fonttype": "path",
    "svg.hashsalt": "ddtree",
    "text.parse_math": False,
}


class Look(NamedTuple):
    """Of an arm or a set in a plot."""

    colour: str
    marker: str
    line: str = "-"
    hatch: str = ""


def label(text: object) -> str:
    """A name as a plot shows it: in one line, cut short, and never one that matplotlib leaves out."""
    line = "".join(c if c.isprintable() else "?" for c in str(text))
    line = line if len(line) <= MAX_LABEL else f"{line[: MAX_LABEL - 1]}…"
    return f" {line}" if line.startswith("_") else line


def arm_looks(arms: Sequence[Arm]) -> dict[Arm, Look]:
    """Grey for plain, vermilion for the chain, blue for trees: the larger the lighter; others by number."""
    trees = [arm for arm in arms if arm.mode is Mode.TREE and arm.node_budget != "auto"]
    looks: dict[Arm, Look] = {}
    for number, arm in enumerate(arms):
        if arm.mode is Mode.AR:
            looks[arm] = Look(PLAIN, "x", ":")
        elif arm.mode is Mode.CHAIN:
            looks[arm] = Look(CHAIN, "s", "--", "///")
        elif arm in trees:
            place = trees.index(arm)
            shade = place * (len(TREES) - 1) // max(len(trees) - 1, 1)
            marker = TREE_MARKERS[place % len(TREE_MARKERS)]
            looks[arm] = Look(TREES[shade], marker, "-", HATCHES[place % len(HATCHES)])
        elif arm.mode is Mode.TREE:
            looks[arm] = Look(AUTO, "*", "-.", "xx")
        else:
            looks[arm] = Look(COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)])
    return looks


def by_number(number: int, line: int = 0) -> Look:
    """The look of the n-th set, and of the n-th engine in its lines."""
    return Look(
        COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], LINES[line % len(LINES)],
        HATCHES[number % len(HATCHES)],
    )  # fmt: skip


@contextmanager
def drawing() -> Iterator[None]:
    """Our style, while plots are made and written.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "bench") from error
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Names may have letters that the font lacks; a box stands for them.
        warnings.filterwarnings("ignore", message=r".*Glyph .* missing from", category=UserWarning)
        yield


def panels(
    count: int, *, width: float = PANEL_INCHES[0], height: float = PANEL_INCHES[1]
) -> tuple[Figure, list[Axes]]:
    """A figure with that many panels, at most three beside each other."""
    from matplotlib.figure import Figure

    columns = min(count, MAX_COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(columns * width, 6.4), rows * height), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def plain_ticks(axis: Axis, *, is_log: bool = False) -> None:
    """Whole numbers with commas, and no powers on a logarithmic scale."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if is_log:
        axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def whole_ticks(axes: Axes) -> None:
    """Ticks at whole numbers along x."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def from_zero(axes: Axes) -> None:
    """The y axis from zero to a little above all points."""
    top = float(axes.dataLim.ymax)
    axes.set_ylim(0, 1.08 * top if 0 < top < math.inf else 1)


def legend_below(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels, under them, each name once."""
    found: dict[str, Any] = {}
    for panel in axes:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found:
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), 5))


def picture(figure: Figure, name: str, title: str, alt: str) -> Picture:
    """The drawn figure as SVG and PNG."""
    png = _png(figure)
    figure.set_layout_engine("none")  # it has found everything's place, which takes half the time
    return Picture(name, title, alt, _svg(figure), png)


def _svg(figure: Figure) -> str:
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().decode().splitlines()) + "\n"


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def slug(text: str) -> str:
    """A part of a file's name, of letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "x"
