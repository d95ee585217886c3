"""Plots of what rounds do: accept lengths, acceptance by depth and by rank, where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ddtree.bench.document import Picture, escaped
from ddtree.bench.plot_style import (
    Look,
    arm_looks,
    by_number,
    label,
    legend_below,
    panels,
    picture,
    plain_ticks,
    slug,
    whole_ticks,
)
from ddtree.bench.summary import ArmFigures
from ddtree.bench.tables import requests, temperature
from ddtree.config import Mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[ArmFigures]
MAX_TREES = 3  # in a histogram: more bars say nothing more
STAGES = ("prefill", "draft", "build", "verify", "accept", "commit")


class RoundsPlot(NamedTuple):
    """A kind of plot: what it needs of an arm, how a panel is drawn, whether a few trees do."""

    name: str
    title: str
    shows: str
    figure: Callable[[ArmFigures], Mapping[int, int] | Mapping[str, float]]
    draw: Callable[[Axes, Rows, Mapping[str, Look]], None]
    has_few_trees: bool = False


def draw_rounds(rows: Rows) -> Iterator[Picture]:
    """The plots of each engine's rounds, at the least concurrency at which they were seen."""
    for plot in PLOTS:
        yield from _of_each_engine(rows, plot)


def _of_each_engine(rows: Rows, plot: RoundsPlot) -> Iterator[Picture]:
    """A picture an engine and temperature, of the drafting arms that have the figure."""
    drafting = [row for row in rows if row.arm.mode is not Mode.AR]
    known = [row for row in drafting if any(value > 0 for value in plot.figure(row).values())]
    for number, ((engine, heat), group) in enumerate(_by_engine(known).items(), 1):
        least = min(row.setting.concurrency for row in group)
        kept = [row for row in group if row.setting.concurrency == least]
        kept = _few_trees(kept) if plot.has_few_trees else kept
        figure = _draw_panels(kept, plot)
        yield picture(
            figure,
            f"{plot.name}-{number}-{slug(engine)}",
            f"{plot.title}: {escaped(engine)}, {temperature(heat)}, {requests(least)}",
            f"{plot.shows}, a panel for each prompt set. The tables hold the means.",
        )


def _draw_panels(rows: Rows, plot: RoundsPlot) -> Figure:
    sets: dict[str, list[ArmFigures]] = {}
    for row in rows:
        sets.setdefault(row.setting.prompt_set, []).append(row)
    looks = arm_looks(list(dict.fromkeys(row.arm for row in rows)))
    figure, axes = panels(len(sets))
    for panel, (prompt_set, found) in zip(axes, sets.items(), strict=True):
        plot.draw(panel, found, {row.label: looks[row.arm] for row in found})
        panel.set_title(label(prompt_set))
    for panel in axes[1:]:
        panel.set_ylabel("")
    legend_below(figure, axes)
    return figure


def _by_engine(rows: Rows) -> dict[tuple[str, float], list[ArmFigures]]:
    groups: dict[tuple[str, float], list[ArmFigures]] = {}
    for row in rows:
        groups.setdefault((row.engine, row.setting.temperature), []).append(row)
    return groups


def _few_trees(rows: Rows) -> list[ArmFigures]:
    """All arms but trees, of which the least, the middle and the largest budget remain."""
    budgets = sorted({row.arm.node_budget for row in rows if isinstance(row.arm.node_budget, int)} - {0})
    if len(budgets) > MAX_TREES:
        budgets = [budgets[0], budgets[len(budgets) // 2], budgets[-1]]
    return [row for row in rows if row.arm.mode is not Mode.TREE or row.arm.node_budget in (*budgets, "auto")]


def shares(counts: Mapping[int, int]) -> dict[int, float]:
    """Percent of the whole."""
    total = sum(counts.values())
    return {value: 100 * count / total for value, count in counts.items()}


def share_above(counts: Mapping[int, int]) -> dict[int, float]:
    """For each depth from 1, the share of rounds whose accept length exceeds it."""
    total = sum(counts.values())
    return {
        depth: sum(count for length, count in counts.items() if length > depth) / total
        for depth in range(1, max(counts, default=0) + 1)
    }


def _lengths(axes: Axes, rows: Rows, looks: Mapping[str, Look]) -> None:
    _bars(axes, rows, looks, lambda row: shares(row.accept_histogram))
    axes.set(xlabel="accept length, tokens", ylabel="share of rounds, %")


def _by_rank(axes: Axes, rows: Rows, looks: Mapping[str, Look]) -> None:
    _bars(axes, rows, looks, lambda row: shares(row.rank_histogram))
    axes.set(xlabel="rank among siblings (0: the likeliest)", ylabel="share of correct drafts, % (log scale)")
    axes.set_yscale("log")
    plain_ticks(axes.yaxis, is_log=True)


def _bars(
    axes: Axes, rows: Rows, looks: Mapping[str, Look], figure: Callable[[ArmFigures], Mapping[int, float]]
) -> None:
    """Bars of all rows beside each other at each whole number."""
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        values, look = figure(row), looks[row.label]
        places = [place + width * (number - (len(rows) - 1) / 2) for place in values]
        axes.bar(places, list(values.values()), width, color=look.colour, hatch=look.hatch,
                 edgecolor="white", linewidth=0.3, label=label(row.label))  # fmt: skip
    whole_ticks(axes)


def _by_depth(axes: Axes, rows: Rows, looks: Mapping[str, Look]) -> None:
    for row in rows:
        values, look = share_above(row.accept_histogram), looks[row.label]
        axes.plot(list(values), list(values.values()), color=look.colour, marker=look.marker,
                  linestyle=look.line, label=label(row.label))  # fmt: skip
    axes.set(xlabel="depth d", ylabel="P(accept length > d)", ylim=(0, 1.02))
    whole_ticks(axes)


def _stages(axes: Axes, rows: Rows, looks: Mapping[str, Look]) -> None:
    """A bar an arm; its stages in the order of a round."""
    known = dict.fromkeys(stage for row in rows for stage in row.stages_ms)
    order = [stage for stage in STAGES if stage in known] + [stage for stage in known if stage not in STAGES]
    for number, stage in enumerate(order):
        look = by_number(number)
        ends = [list(accumulate(max(row.stages_ms.get(name, 0.0), 0.0) for name in order)) for row in rows]
        widths = [max(row.stages_ms.get(stage, 0.0), 0.0) for row in rows]
        starts = [end[number] - width for end, width in zip(ends, widths, strict=True)]
        axes.barh(range(len(rows)), widths, left=starts, color=look.colour, hatch=look.hatch,
                  edgecolor="white", linewidth=0.4, label=label(stage))  # fmt: skip
    axes.set_yticks(range(len(rows)), [label(row.arm.plan or row.label) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a round")


PLOTS = (
    RoundsPlot("lengths", "Rounds by accept length",
               "Bar charts of the share of rounds by accept length, the chain beside trees",
               lambda row: row.accept_histogram, _lengths, has_few_trees=True),
    RoundsPlot("depth", "Acceptance by depth",
               "Line charts of the share of rounds whose accept length exceeds a depth, a line for each arm",
               lambda row: row.accept_histogram, _by_depth),
    RoundsPlot("rank", "Correct drafts by rank",
               "Bar charts of correct drafts by their rank among their siblings",
               lambda row: row.rank_histogram, _by_rank, has_few_trees=True),
    RoundsPlot("stages", "Where a round's time goes",
               "Stacked bars of the milliseconds that each stage of a round takes, a bar for each arm",
               lambda row: row.stages_ms, _stages),
)  # fmt: skip
