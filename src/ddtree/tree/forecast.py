"""What plans should do at budgets and loads that were not measured, and how far off that may be.

Accept lengths come from those of the measured trees: they rise with the budget and depend on nothing else.
Round times come from the measured ones around them, or from the cost model fitted to these where the models'
shapes and the GPU are known. Either way each measured time is foretold from the others alone, and the typical
error of that is the forecast's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ddtree.config import Mode
from ddtree.tree.budget_cost import DraftPlan
from ddtree.tree.cost_fit import CostPoint, Prediction, fit, leave_one_out, typical_error
from ddtree.tree.cost_model import Calibration, DraftPair, GpuSpec, Load, round_cost
from ddtree.tree.plan_rates import NORMAL_975, Evidence, Forecast, Measured, Ratio, short_plan

MIN_FIT_POINTS = 4
FREE = ("bandwidth_share", "flop_share", "layer_latency_s", "tree_s", "step_host_s", "round_host_s",
        "request_host_s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Measured seconds of a round at a load, with its share of the prefills.

    `seconds` is by the nominal load; `in_flight` requests there really were, on average.
    """

    plan: DraftPlan
    num_requests: int
    seconds: float
    in_flight: float

    @property
    def name(self) -> str:
        return f"{short_plan(self.plan)}, {self.num_requests} at once"


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Foretells round times.

    Attributes:
        method: how, in a few words.
        predict: seconds of a round of a plan at a load; None where it cannot be told.
        error: typical error as a share, from `left_out`; None where nothing could be left out.
        left_out: measured times, each as foretold from all the others.
    """

    method: str
    predict: Callable[[DraftPlan, int], float | None]
    error: float | None
    left_out: tuple[Prediction, ...] = ()


def round_times_of(measured: Iterable[Evidence]) -> list[RoundTime]:
    """The times in what was measured, where rounds are known."""
    return [
        RoundTime(found.plan, found.num_requests, seconds, found.in_flight or found.num_requests)
        for found in measured
        if isinstance(found, Measured) and (seconds := found.round_s) is not None
    ]


def modelled_times(
    points: Sequence[RoundTime], pair: DraftPair, gpu: GpuSpec, start: Calibration, context_tokens: float
) -> RoundTimes:
    """By the cost model, fitted to the points from a calibration to start at."""
    names = FREE if any(point.num_requests > 1 for point in points) else FREE[:-1]
    free = [name for name in names if getattr(start, name) > 0]
    known = [_cost_point(point, pair, gpu, context_tokens) for point in points]
    fitted = fit(known, start, free)
    left_out = tuple(leave_one_out(known, start, free))

    def predict(plan: DraftPlan, num_requests: int) -> float | None:
        return _model_s(pair, gpu, fitted, context_tokens, plan, num_requests)

    method = f"cost model of {pair.target.name} on {gpu.name}, fitted to the measured rounds"
    return RoundTimes(method, predict, typical_error(left_out), left_out)


def calibrated_times(
    pair: DraftPair,
    gpu: GpuSpec,
    calibration: Calibration,
    error: float,
    context_tokens: float,
    tp_size: int = 1,
) -> RoundTimes:
    """By the cost model as it is, for a machine on which nothing was measured."""

    def predict(plan: DraftPlan, num_requests: int) -> float | None:
        return _model_s(pair, gpu, calibration, context_tokens, plan, num_requests, tp_size)

    count = f"{tp_size} x " if tp_size > 1 else ""
    return RoundTimes(f"cost model of {pair.target.name} on {count}{gpu.name}", predict, error)


def _cost_point(point: RoundTime, pair: DraftPair, gpu: GpuSpec, context_tokens: float) -> CostPoint:
    return CostPoint(
        point.name, point.seconds * point.in_flight / point.num_requests,
        lambda c: _model_s(pair, gpu, c, context_tokens, point.plan, point.in_flight),
    )  # fmt: skip


def _model_s(
    pair: DraftPair, gpu: GpuSpec, calibration: Calibration, context_tokens: float, plan: DraftPlan,
    num_requests: float, tp_size: int = 1,
) -> float:  # fmt: skip
    load = Load(num_requests, context_tokens, tp_size)
    asked = pair.chain if plan.mode is Mode.CHAIN else plan
    return round_cost(pair, gpu, calibration, load, asked).total_s


def interpolated_times(points: Sequence[RoundTime]) -> RoundTimes:
    """Between the measured times, logarithms over logarithms; nothing beyond the outermost ones."""
    left_out = tuple(
        Prediction(point.name, point.seconds, foretold)
        for index, point in enumerate(points)
        if (foretold := _between([*points[:index], *points[index + 1 :]], point.plan, point.num_requests))
        is not None
    )
    error = typical_error(left_out) if left_out else None
    return RoundTimes(
        "interpolation between the measured rounds",
        lambda plan, load: _between(points, plan, load),
        error,
        left_out,
    )


def _between(points: Sequence[RoundTime], plan: DraftPlan, num_requests: int) -> float | None:
    """From trees of other budgets at the same load, else from the plan's times at other loads."""
    at_load = {
        math.log(point.plan.node_budget + 1): math.log(point.seconds)
        for point in points
        if point.num_requests == num_requests and point.plan.mode is plan.mode is Mode.TREE
    }
    of_plan = {
        math.log(point.num_requests): math.log(point.seconds) for point in points if point.plan == plan
    }
    logged = _line(at_load, math.log(plan.node_budget + 1))
    logged = _line(of_plan, math.log(num_requests)) if logged is None else logged
    return None if logged is None else math.exp(logged)


def _line(known: dict[float, float], at: float) -> float | None:
    """Straight between the neighbours; None outside of them."""
    xs = sorted(known)
    if at in known:
        return known[at]
    place = bisect_left(xs, at)
    if place in (0, len(xs)):
        return None
    left, right = xs[place - 1], xs[place]
    share = (at - left) / (right - left)
    return (1 - share) * known[left] + share * known[right]


def accept_lengths(measured: Iterable[Evidence]) -> Callable[[DraftPlan], Ratio | None]:
    """Accept length by plan, all loads together; of a tree between measured budgets over their logarithms.

    Lengths of trees are made to rise with the budget (isotonic regression, weighted by rounds). None where
    the plan lies outside of what was measured.
    """
    pooled = _pooled(measured)
    trees = sorted(plan.node_budget for plan in pooled if plan.mode is Mode.TREE)
    found = [pooled[DraftPlan(Mode.TREE, budget)] for budget in trees]
    rising = isotonic([length for length, _, _ in found], [weight for _, weight, _ in found])
    lengths = {math.log(budget): value for budget, value in zip(trees, rising, strict=True)}
    errors = {math.log(budget): entry[2] for budget, entry in zip(trees, found, strict=True)}

    def length(plan: DraftPlan) -> Ratio | None:
        if plan.mode is Mode.AR:
            return Ratio(1.0, 1.0, 1.0)
        if plan.mode is Mode.CHAIN:
            return _ratio(*pooled[plan][::2]) if plan in pooled else None
        at = math.log(plan.node_budget)
        value, error = _line(lengths, at), _line(errors, at)
        return None if value is None or error is None else _ratio(value, error)

    return length


def _pooled(measured: Iterable[Evidence]) -> dict[DraftPlan, tuple[float, float, float]]:
    """Of each plan: accept length over all loads, rounds, and the length's error as a logarithm."""
    sums: dict[DraftPlan, list[tuple[float, float, float]]] = defaultdict(list)
    for found in measured:
        if not isinstance(found, Measured) or found.plan.mode is Mode.AR:
            continue
        length = found.accept_length
        if length is not None:
            error = math.log(length.high / length.value) / NORMAL_975 if length.high else 0.0
            sums[found.plan].append((length.value, found.rounds, error))
    return {
        plan: (
            math.fsum(length * rounds for length, rounds, _ in entries) / math.fsum(e[1] for e in entries),
            math.fsum(e[1] for e in entries),
            min(e[2] for e in entries),
        )
        for plan, entries in sums.items()
    }


def _ratio(value: float, log_error: float) -> Ratio:
    spread = math.exp(NORMAL_975 * log_error)
    return Ratio(value, value / spread, value * spread)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest rising sequence in weighted squares, by pooling neighbours that fall."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, entries
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, one_weight, one_ct), (two, two_weight, two_ct) = blocks[-2:]
            total = one_weight + two_weight
            blocks[-2:] = [((one * one_weight + two * two_weight) / total, total, one_ct + two_ct)]
    return [mean for mean, _, count in blocks for _ in range(count)]


def forecasts(
    lengths: Callable[[DraftPlan], Ratio | None],
    times: Sequence[RoundTimes],
    plans: Iterable[DraftPlan],
    num_requests: int,
) -> list[Forecast]:
    """Each plan at a load, where both its accept length and its round time can be told.

    Of the ways to foretell round times the first that can tell one is taken.
    """
    made = []
    for plan in plans:
        length, told = lengths(plan), _first_told(times, plan, num_requests)
        if length is None or told is None:
            continue
        seconds, time_error = told
        length_error = math.log(length.high / length.value) / NORMAL_975 if length.high else 0.0
        error = math.hypot(math.log1p(time_error), length_error)
        made.append(Forecast(plan, num_requests, length.value, seconds, error))
    return made


def _first_told(
    times: Sequence[RoundTimes], plan: DraftPlan, num_requests: int
) -> tuple[float, float] | None:
    """Seconds of a round and the typical error of that."""
    for way in times:
        seconds = way.predict(plan, num_requests)
        if seconds is not None and way.error is not None:
            return seconds, way.error
    return None
