"""The plots of a report; each tells nothing that the tables do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ddtree.bench.document import Picture
from ddtree.bench.plot_style import (
    GREY,
    Look,
    arm_looks,
    by_number,
    drawing,
    from_zero,
    label,
    legend_below,
    panels,
    picture,
    plain_ticks,
    slug,
)
from ddtree.bench.plots_rounds import draw_rounds
from ddtree.bench.published import paper_budget_curve
from ddtree.bench.summary import ArmFigures
from ddtree.bench.tables import requests, temperature
from ddtree.config import Mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[ArmFigures]
PAPER = "paper: Qwen3-8B, MATH-500, greedy, 8x H200"


def report_pictures(rows: Rows, *, with_paper: bool = False) -> list[Picture]:
    """All plots for which there are figures.

    Args:
        rows: arms of one run, or of several that may stand side by side.
        with_paper: draw figure 3 of the DDTree paper into the plots over node budget.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with drawing():
        return [
            *over_budget(rows, with_paper=with_paper),
            *over_concurrency(rows),
            *speed_over_length(rows),
            *draw_rounds(rows),
        ]


def by(rows: Rows, key: Callable[[ArmFigures], Any]) -> dict[Any, list[ArmFigures]]:
    """Rows in groups, in the order in which each group is first met."""
    groups: dict[Any, list[ArmFigures]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _conditions(row: ArmFigures) -> tuple[float, int]:
    return row.setting.temperature, row.setting.concurrency


# -- over node budget ------------------------------------------------------------------------------


def over_budget(rows: Rows, *, with_paper: bool = False) -> Iterator[Picture]:
    """Speed-up over plain and accept length over node budget, as in the paper's figure 3."""
    for (heat, concurrency), group in by(rows, _conditions).items():
        if any(row.arm.mode is Mode.TREE for row in group):
            yield picture(
                _budget_figure(group, with_paper=with_paper and heat == 0),  # the paper's is greedy
                f"budget-t{slug(f'{heat:g}')}-c{concurrency}",
                f"Speed-up and accept length over node budget: {temperature(heat)}, {requests(concurrency)}",
                "Two line charts over node budget, a line for each prompt set and engine: speed-up over "
                "plain decoding, and accept length. The tables hold every figure.",
            )


def _budget_figure(rows: Rows, *, with_paper: bool) -> Figure:
    places = _budget_places(rows, with_paper=with_paper)
    figure, (speed, length) = panels(2, width=4.8, height=3.9)
    engines = list(by(rows, lambda row: row.engine))
    for number, (prompt_set, of_set) in enumerate(by(rows, lambda row: row.setting.prompt_set).items()):
        for engine, line in by(of_set, lambda row: row.engine).items():
            look = by_number(number, engines.index(engine))
            name = label(prompt_set if len(engines) == 1 else f"{prompt_set}, {engine}")
            _budget_line(speed, line, places, look, name, _speed_up)
            _budget_line(length, line, places, look, name, lambda row: row.accept_length)
    if with_paper:
        _paper_line(speed, length, places)
    if not speed.has_data():
        speed.text(0.5, 0.6, "no plain decoding to compare with", transform=speed.transAxes, ha="center")
    speed.axhline(1, color=GREY, linewidth=0.9)
    speed.set_ylabel("speed-up, times plain decoding")
    length.set_ylabel("accept length, tokens a round")
    for axes in (speed, length):
        axes.set_xlabel("node budget, nodes of a tree (log scale)")
        axes.set_xticks(list(places.values()), list(places))
        axes.set_xlim(min(places.values()) - 0.4, max(places.values()) + 0.4)
        from_zero(axes)
    legend_below(figure, (speed, length))
    return figure


def _speed_up(row: ArmFigures) -> float | None:
    return None if row.to_plain is None else row.to_plain.value


def _budget_places(rows: Rows, *, with_paper: bool) -> dict[str, float]:
    """Where on the axis: the chain left of the least budget, then budgets by their logarithm, then auto."""
    budgets = {row.arm.node_budget for row in rows if isinstance(row.arm.node_budget, int)} - {0}
    modes = {row.arm.mode for row in rows}
    if with_paper:
        budgets |= {budget for budget, _, _ in paper_budget_curve() if budget}
        modes.add(Mode.CHAIN)
    places = {str(budget): math.log2(budget) for budget in sorted(budgets)}
    ends = list(places.values()) or [0.0]
    if Mode.CHAIN in modes:
        places = {"chain": ends[0] - 1} | places
    if any(row.arm.node_budget == "auto" for row in rows):
        places["auto"] = ends[-1] + 1
    return places


def _budget_line(
    axes: Axes, rows: Rows, places: dict[str, float], look: Look, name: str,
    figure: Callable[[ArmFigures], float | None],
) -> None:  # fmt: skip
    """Trees joined by a line; the chain and auto stand alone beside it."""
    points = {row.arm: value for row in rows if (value := figure(row)) is not None}
    trees = sorted(
        (places[str(arm.node_budget)], value)
        for arm, value in points.items()
        if arm.mode is Mode.TREE and arm.node_budget != "auto"
    )
    if trees:
        axes.plot(*zip(*trees, strict=True), color=look.colour, marker=look.marker, linestyle=look.line,
                  label=name)  # fmt: skip
    alone = [
        (places["chain" if arm.mode is Mode.CHAIN else "auto"], value)
        for arm, value in points.items()
        if arm.mode is Mode.CHAIN or arm.node_budget == "auto"
    ]
    if alone:
        axes.plot(*zip(*alone, strict=True), color=look.colour, marker=look.marker, linestyle="",
                  markerfacecolor="white", label=None if trees else name)  # fmt: skip
    for place, value in alone[:1] if trees else []:
        end = trees[0] if place < trees[0][0] else trees[-1]
        axes.plot((place, end[0]), (value, end[1]), color=look.colour, linestyle=":", linewidth=0.8)


def _paper_line(speed: Axes, length: Axes, places: dict[str, float]) -> None:
    curve = paper_budget_curve()
    xs = [places[str(budget) if budget else "chain"] for budget, _, _ in curve]
    for axes, ys in ((speed, [times for _, times, _ in curve]), (length, [tau for _, _, tau in curve])):
        axes.plot(xs, ys, color=GREY, linestyle=(0, (5, 2)), linewidth=1.2,
                  label=PAPER)  # fmt: skip


# -- over concurrency ------------------------------------------------------------------------------


def over_concurrency(rows: Rows) -> Iterator[Picture]:
    """Tokens/s over requests at once, a line an arm, a panel a prompt set."""
    for heat, group in by(rows, lambda row: row.setting.temperature).items():
        sets = {
            name: found
            for name, found in by(group, lambda row: row.setting.prompt_set).items()
            if len({row.setting.concurrency for row in found}) > 1
        }
        if not sets:
            continue
        figure, axes = panels(len(sets))
        for panel, (name, found) in zip(axes, sets.items(), strict=True):
            _concurrency_lines(panel, found)
            panel.set_title(label(name))
        axes[0].set_ylabel("tokens/s of all requests (log scale)")
        legend_below(figure, axes)
        yield picture(
            figure,
            f"concurrency-t{slug(f'{heat:g}')}",
            f"Tokens/s over requests at once: {temperature(heat)}",
            "Line charts of tokens/s over the number of requests at once, a line for each arm, a panel for "
            "each prompt set. The tables hold every figure.",
        )


def _concurrency_lines(axes: Axes, rows: Rows) -> None:
    ticks = sorted({row.setting.concurrency for row in rows})
    engines = list(by(rows, lambda row: row.engine))
    looks = arm_looks(list(dict.fromkeys(row.arm for row in rows)))
    for name, line in by(rows, lambda row: row.label).items():
        points = sorted(
            (row.setting.concurrency, row.tokens_per_s.median)
            for row in line
            if row.tokens_per_s is not None and row.tokens_per_s.median > 0
        )
        if points:
            look = looks[line[0].arm]
            width = 1.0 + 0.8 * engines.index(line[0].engine)
            axes.plot(*zip(*points, strict=True), color=look.colour, marker=look.marker, linestyle=look.line,
                      linewidth=width, label=label(name))  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="requests at once (log scale)")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    plain_ticks(axes.yaxis, is_log=True)


# -- speed over accept length ----------------------------------------------------------------------


def speed_over_length(rows: Rows) -> Iterator[Picture]:
    """Tokens/s over accept length: what a longer accept length is worth."""
    known = [row for row in rows if row.tokens_per_s and row.accept_length]
    for (heat, concurrency), group in by(known, _conditions).items():
        sets = by(group, lambda row: row.setting.prompt_set)
        figure, axes = panels(len(sets))
        looks = arm_looks(list(dict.fromkeys(row.arm for row in group)))
        for panel, (name, found) in zip(axes, sets.items(), strict=True):
            for row in found:
                _speed_point(panel, row, looks[row.arm])
            panel.set(title=label(name), xlabel="accept length, tokens a round")
            from_zero(panel)
            plain_ticks(panel.yaxis)
        axes[0].set_ylabel("tokens/s of all requests")
        legend_below(figure, axes)
        yield picture(
            figure,
            f"speed-length-t{slug(f'{heat:g}')}-c{concurrency}",
            f"Tokens/s over accept length: {temperature(heat)}, {requests(concurrency)}",
            "Scatter plots of tokens/s over accept length, a point for each arm with its range over repeats, "
            "a panel for each prompt set. The tables hold every figure.",
        )


def _speed_point(axes: Axes, row: ArmFigures, look: Look) -> None:
    middle, low, high = row.tokens_per_s or (math.nan,) * 3
    axes.errorbar(
        [row.accept_length or math.nan], [middle], yerr=[[middle - low], [high - middle]], color=look.colour,
        marker=look.marker, linestyle="", capsize=2, label=label(row.label),
    )  # fmt: skip
