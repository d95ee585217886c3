"""Draws a training log: loss, right tokens by position, and accept length over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree.errors import ConfigError, MissingExtraError
from ddtree.train.training_log import LogRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (12.0, 4.0)
DOTS_PER_INCH = 110
# Depths that show how fast a block's later positions get harder.
SHOWN_DEPTHS = (1, 2, 4, 8, 15)


def plot_log(rows: Sequence[LogRow], path: Path) -> Path:
    """Write a PNG with three panels; returns its path.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: there are no rows.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train") from None
    if not rows:
        raise ConfigError("the training log has no rows yet: nothing to draw")
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    loss, correct, accept = figure.subplots(1, 3)
    draw_loss(loss, rows)
    draw_correct(correct, rows)
    draw_accept_lengths(accept, rows)
    figure.savefig(path, format="png")
    return path


def draw_loss(axes: Axes, rows: Sequence[LogRow]) -> None:
    axes.plot([row.step for row in rows], [row.loss for row in rows], linewidth=0.8)
    finish(axes, "loss")


def draw_correct(axes: Axes, rows: Sequence[LogRow]) -> None:
    steps = [row.step for row in rows]
    for depth in SHOWN_DEPTHS:
        if depth <= len(rows[0].position_correct):
            shares = [row.position_correct[depth - 1] for row in rows]
            axes.plot(steps, shares, linewidth=0.8, label=f"position {depth}")
    finish(axes, "right tokens, share")


def draw_accept_lengths(axes: Axes, rows: Sequence[LogRow]) -> None:
    measured = [row for row in rows if row.accept_lengths]
    for column in measured[0].accept_lengths if measured else ():
        points = [(row.step, row.accept_lengths[column]) for row in measured if column in row.accept_lengths]
        label = column if column == "chain" else f"B={column}"
        axes.plot([step for step, _ in points], [length for _, length in points], marker=".", label=label)
    finish(axes, "held-out accept length, tokens a round")


def finish(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
