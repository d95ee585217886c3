"""Which plan to set: plain decoding, the chain or a tree, from texts that were decoded under each.

The simpler plan is the answer until the next one surely beats it. A tree is set where even the low end of its
gain over the chain is more than `MARGIN`; of several such trees the smallest within `MARGIN` of the fastest,
since a small one leaves memory and batch room; plain decoding where drafting is no faster at all. Forecasts
are judged by their values, and only where nothing was measured. Plain Python, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddtree.config import Mode, check
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.plan_rates import MARGIN, Evidence, Forecast, Measured, Ratio, plan_order, rate_ratio


@dataclass(frozen=True, slots=True)
class Option:
    """A plan at one load, beside the chain and plain decoding where these are known."""

    plan: DraftPlan
    tokens_per_s: float
    accept_length: Ratio | None
    over_chain: Ratio | None
    over_plain: Ratio | None
    is_predicted: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set for one load.

    Attributes:
        plan: to set.
        is_certain: False where the choice is within the noise of what was measured.
        reason: one line.
        options: every plan that was judged, plain and chain first, trees by budget.
    """

    num_requests: int
    plan: DraftPlan
    is_certain: bool
    reason: str
    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option:
        """The option that is to be set."""
        return next(option for option in self.options if option.plan == self.plan)


@dataclass(frozen=True, slots=True)
class MixAdvice:
    """The one plan to set for several loads, each counting alike.

    Attributes:
        losses: by load, the share of its rate that it loses against the plan advised there.
    """

    plan: DraftPlan
    is_certain: bool
    reason: str
    losses: Mapping[int, float]


RatioOf = Callable[[DraftPlan, DraftPlan], Ratio | None]


def advise(evidence: Sequence[Evidence]) -> Advice:
    """The plan to set at the load at which all of this was found.

    Where something was measured only that is chosen from; forecasts stand beside it.

    Raises:
        ConfigError: nothing, several loads, or a plan twice.
    """
    by_plan = _by_plan(evidence)
    loads = {found.num_requests for found in evidence}
    check(len(loads) == 1, "num_requests", sorted(loads), "one load at a time")

    def ratio(one: DraftPlan, other: DraftPlan) -> Ratio | None:
        return rate_ratio(by_plan[one], by_plan[other])

    measured = [plan for plan, found in by_plan.items() if isinstance(found, Measured)]
    plan, is_certain, reason = _decide(measured or list(by_plan), ratio)
    if measured:
        reason += _hope([other for other in by_plan if other not in measured], plan, ratio)
    chain = _chain_of(by_plan)
    options = tuple(
        Option(
            plan=known,
            tokens_per_s=found.tokens_per_s,
            accept_length=found.accept_length,
            over_chain=None if chain is None else ratio(known, chain),
            over_plain=ratio(known, PLAIN) if PLAIN in by_plan else None,
            is_predicted=isinstance(found, Forecast),
        )
        for known, found in by_plan.items()
    )
    return Advice(loads.pop(), plan, is_certain, reason, options)


def advise_mix(by_load: Mapping[int, Sequence[Evidence]]) -> MixAdvice | None:
    """The one plan that does best over all loads, by the geometric mean of its rates.

    None where no plan is known at every load. Plans of which all is forecast are chosen only from their like.
    """
    plans = {load: _by_plan(evidence) for load, evidence in by_load.items()}
    check(len(plans) > 0, "by_load", by_load, "one load or more")
    known = [plan for plan in next(iter(plans.values())) if all(plan in found for found in plans.values())]
    if not known:
        return None
    measured = [p for p in known if any(isinstance(found[p], Measured) for found in plans.values())]
    known = measured or known

    def ratio(one: DraftPlan, other: DraftPlan) -> Ratio | None:
        return _mean_ratio([rate_ratio(found[one], found[other]) for found in plans.values()])

    plan, is_certain, reason = _decide(known, ratio)
    losses = {}
    for load, found in plans.items():
        lost = rate_ratio(found[plan], found[advise(by_load[load]).plan])
        losses[load] = 0.0 if lost is None else 1 - lost.value
    return MixAdvice(plan, is_certain, reason, losses)


def _hope(foretold: Sequence[DraftPlan], plan: DraftPlan, ratio: RatioOf) -> str:
    """Which plan that was not measured is worth measuring."""
    best = max(foretold, key=lambda other: _value(ratio(other, plan)), default=plan)
    found = ratio(best, plan)
    if best == plan or found is None or found.value <= 1 + MARGIN:
        return ""
    return f"; {best} is foretold to be {found} times that: measure it"


def _by_plan(evidence: Sequence[Evidence]) -> dict[DraftPlan, Evidence]:
    check(len(evidence) > 0, "evidence", evidence, "one plan or more")
    by_plan = {found.plan: found for found in sorted(evidence, key=lambda found: plan_order(found.plan))}
    check(len(by_plan) == len(evidence), "evidence", [str(e.plan) for e in evidence], "each plan once")
    return by_plan


def _chain_of(plans: Iterable[DraftPlan]) -> DraftPlan | None:
    return next((plan for plan in plans if plan.mode is Mode.CHAIN), None)


def _mean_ratio(ratios: Sequence[Ratio | None]) -> Ratio | None:
    """The geometric mean; its interval is that of ratios that err alike."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None

    def mean(values: Iterable[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        if len(numbers) < len(known):
            return None
        return math.exp(math.fsum(map(math.log, numbers)) / len(numbers)) if min(numbers) > 0 else 0.0

    value = mean(ratio.value for ratio in known)
    assert value is not None
    low, high = mean(ratio.low for ratio in known), mean(ratio.high for ratio in known)
    return Ratio(value, low, high, is_predicted=any(ratio.is_predicted for ratio in known))


def _decide(plans: Sequence[DraftPlan], ratio: RatioOf) -> tuple[DraftPlan, bool, str]:
    """The plan, whether that is certain, and why; `plans` in the order of `plan_order`."""
    trees = [plan for plan in plans if plan.mode is Mode.TREE]
    base = _chain_of(plans) or (PLAIN if PLAIN in plans else None)
    if base is None:
        fastest = max(trees, key=lambda tree: _value(ratio(tree, trees[0])))
        return fastest, False, "neither the chain nor plain decoding is known here, so the gain is not either"
    over = {tree: found for tree in trees if (found := ratio(tree, base)) is not None}
    if trees and not over:
        return base, False, f"the trees were measured on other texts than {_named(base)}"
    plan, is_certain, reason = _tree_or_base(over, base)
    if plan == PLAIN or PLAIN not in plans:
        return plan, is_certain, reason
    over_plain = ratio(plan, PLAIN)
    if over_plain is None:
        return plan, False, f"{reason}; plain decoding was measured on other texts"
    said = f"{_named(plan)} is {over_plain} times plain decoding"
    joined = f" and {over_plain} times plain decoding" if plan.mode is Mode.TREE else f"; {said}"
    is_clear = over_plain.low is not None and over_plain.high is not None and (
        over_plain.low > 1 or over_plain.high < 1
    )  # fmt: skip
    if over_plain.value <= 1:
        return PLAIN, is_certain and is_clear, f"drafting does not pay: {said}"
    return plan, is_certain and is_clear, f"{reason}{joined}"


def _tree_or_base(over: Mapping[DraftPlan, Ratio], base: DraftPlan) -> tuple[DraftPlan, bool, str]:
    """A tree that pays, else the base (the chain, or plain decoding where no chain was measured)."""
    if not over:
        return base, True, "no tree was measured"
    paying = {tree: found for tree, found in over.items() if found.is_gain}
    if not paying:
        best = max(over, key=lambda tree: over[tree].value)
        may_pay = any(found.may_be_gain and not found.is_predicted for found in over.values())
        return base, not may_pay, (
            f"no tree is surely more than {MARGIN:.0%} faster than {_named(base)}: the best, {best}, is "
            f"{over[best]} times {_named(base)}"
        )  # fmt: skip
    fastest = max(paying, key=lambda tree: paying[tree].value)
    enough = (1 - MARGIN) * paying[fastest].value
    plan = min((tree for tree, found in paying.items() if found.value >= enough), key=plan_order)
    small = "" if plan == fastest else f"{fastest} is at most {MARGIN:.0%} faster than {plan}, which"
    return plan, True, f"{small or plan} is {paying[plan]} times {_named(base)}"


def _named(plan: DraftPlan) -> str:
    return {Mode.AR: "plain decoding", Mode.CHAIN: "the chain"}.get(plan.mode, str(plan))


def _value(ratio: Ratio | None) -> float:
    return 0.0 if ratio is None else ratio.value
