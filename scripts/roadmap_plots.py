"""The roadmap's two pictures, as SVG that is the same at every run."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from roadmap_lengths import LengthCurve, prediction_curves
from roadmap_performance import CONTEXT_TOKENS, MORE_REQUESTS, Setting
from roadmap_points import embedded_fit, large_fit, sglang_fit, tree

from ddtree.tree.cost_catalogue import H200, PAIRS
from ddtree.tree.cost_fit import typical_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = (("Qwen3-8B", "MT-Bench"), ("Qwen3.6-27B", "GSM8K"), ("gpt-oss-120b", "chat"))


def svg(figure: Figure) -> str:
    """The figure as text without a date or random names."""
    FigureCanvasSVG(figure)
    buffer = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ddtree", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().decode().splitlines()) + "\n"


def foretold() -> str:
    """Every fitted time against the prediction by a fit without it."""
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for fitted, marker in ((embedded_fit(), "o"), (sglang_fit(), "s"), (large_fit(), "^")):
        measured = [shown(point.seconds * 1e3) for point in fitted.predictions]
        predicted = [shown(point.predicted_s * 1e3) for point in fitted.predictions]
        label = f"{fitted.title}: {typical_error(fitted.predictions):.0%}"
        axes.plot(measured, predicted, marker, markersize=4, alpha=0.7, label=label)
    axes.plot([0.15, 200], [0.15, 200], color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted without it, ms")
    axes.legend(fontsize=7, title="typical error", title_fontsize=7)
    return svg(figure)


def shown(value: float) -> float:
    """Three digits, so that another machine's rounding draws the same picture."""
    return float(f"{value:.3g}")


def curve_of(target: str, prompts: str) -> LengthCurve:
    return next(c for c in prediction_curves() if (c.target, c.prompts) == (target, prompts))


def where_it_pays() -> str:
    """Predicted speed-up over plain decoding by requests at once, on one H200."""
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    for axes, (target, prompts) in zip(figure.subplots(1, len(SHOWN), sharey=True), SHOWN, strict=True):
        draw_speed_ups(axes, curve_of(target, prompts))
    figure.axes[0].set_ylabel("predicted, times plain")
    figure.axes[-1].legend(fontsize=7)
    return svg(figure)


def draw_speed_ups(axes: Axes, curve: LengthCurve) -> None:
    calibration, pair = large_fit().calibration, PAIRS[curve.target]
    plans = (
        ("chain", pair.chain, ":"),
        ("tree of block - 1", pair.narrow_tree, "-"),
        ("tree 31", tree(31), "--"),
        ("tree 63", tree(63), "-."),
    )
    for name, plan, style in plans:
        settings = [Setting(curve, H200, requests) for requests in MORE_REQUESTS]
        possible = [setting for setting in settings if setting.fits(plan)]
        times = [shown(setting.speed_up(plan, calibration)) for setting in possible]
        axes.plot([setting.requests for setting in possible], times, style, marker=".", label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="requests at once")
    axes.set_xticks(MORE_REQUESTS, [str(requests) for requests in MORE_REQUESTS], fontsize=7)
    axes.minorticks_off()
    axes.set_title(f"{curve.target}, {curve.prompts}, {CONTEXT_TOKENS:,} tokens", fontsize=8)


PICTURES = {"cost-model.svg": foretold, "where-the-tree-pays.svg": where_it_pays}
