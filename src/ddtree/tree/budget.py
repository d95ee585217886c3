"""The node budget policy: each round, plain decoding, the chain, or a tree of some width.

It maximises expected tokens per millisecond, accept length over round time, as CaDDTree
(arXiv 2606.01813) does, but learns both sides while it runs. Draft trees are nested, so one verify
pass at budget B tells what every smaller tree would have got right and, up to censoring, what the
chain would have. What a round cannot show is predicted, and now and then probed, within a fixed
share of the time spent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.config import Mode, check, is_int
from ddtree.tree.budget_cost import PLAIN, CostTable, DraftPlan

__all__ = ["PLAIN", "CostTable", "DraftPlan", "NodeBudgetPolicy", "RoundFeedback", "chain_counterfactual"]

# Cold start. The drafter is presumed useful (1.5 correct drafts by the chain, for two rounds), since one
# that is not soon shows it. Shape of the prior: the trees of the 135M pair, 8 to 256 nodes.
PRIOR_CHAIN_DRAFTS = 1.5
PRIOR_ROUNDS = 2.0
PRIOR_TREE_OVER_CHAIN = 1.3  # a tree of 8 nodes against the chain
PRIOR_GROWTH_EXPONENT = 0.13  # correct drafts grow as budget ** this
PRIOR_DRAFTS = 5.0  # weight of the prior in a calibration, in draft tokens

SLOW_ROUNDS, FAST_ROUNDS = 300.0, 16.0  # windows of the estimate and of its drift alarm
IDLE_ROUNDS = 8.0  # what old evidence still weighs after a long time without drafting
IDLE_DECAY = 0.99
CALIBRATION_DECAY = 0.995
DRIFT_SIGMAS = 3.0
MIN_VARIANCE = 0.1
HYSTERESIS = 0.005  # leave the plan in use only for one this much faster
LEAVE_SIGMAS = 0.5  # and drafting only when it is this surely not worth it: plain rounds teach nothing

PROBE_SHARE_MAX, PROBE_SHARE_MIN = 0.02, 0.005  # of the time spent, first and after many vain probes
PROBE_BACKOFF = 0.9
PROBE_CHANCE = 0.5  # so that probes do not fall into step with the text
SIGHT_DECAY = 0.99
ACCEPT_DOUBT, COST_DOUBT = 1.0, 0.5  # share by which an arm's rate may be off while it was never seen or run


@dataclass(frozen=True, slots=True)
class RoundFeedback:
    """What one round tells the policy, before any cut by max tokens or a stop string.

    `accept_indices` is the accept path in best-first node numbers, root (0) first.
    `num_chain_correct_drafts` is how many top-1 tokens match the committed tokens from the start
    (`chain_counterfactual`); `chain_censored` says that all committed tokens did, so it could be
    more. `surrogate` is the drafter's own forecast: for each of the policy's `tree_budgets`, the sum
    of exp(log_probs) over its nodes (paper section 3). In plain decoding only the first and last count.
    """

    plan: DraftPlan
    num_accept_tokens: int
    round_ms: float
    accept_indices: tuple[int, ...] = (0,)
    num_chain_correct_drafts: int = 0
    chain_censored: bool = False
    surrogate: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check(self.num_accept_tokens >= 1, "num_accept_tokens", self.num_accept_tokens, "1 or more")


def chain_counterfactual(top1_tokens: Sequence[int], accept_tokens: Sequence[int]) -> tuple[int, bool]:
    """How many drafts the chain would have got right in a tree round, and whether that is censored.

    `top1_tokens` holds the drafter's first choice at each of the L depths, `accept_tokens` the
    committed tokens, the bonus token last. Censored means at least that many.
    """
    matches = 0
    for top1, committed in zip(top1_tokens, accept_tokens, strict=False):
        if top1 != committed:
            return matches, False
        matches += 1
    return matches, matches < len(top1_tokens)


@dataclass(slots=True)
class _Calibration:
    """Seen over predicted, both decayed sums, from a prior of 1."""

    seen: float = PRIOR_DRAFTS
    predicted: float = PRIOR_DRAFTS

    @property
    def ratio(self) -> float:
        return self.seen / self.predicted

    def add(self, seen: float, predicted: float) -> None:
        self.seen = max(self.seen * CALIBRATION_DECAY + seen, 1e-6)
        self.predicted = max(self.predicted * CALIBRATION_DECAY + predicted, 1e-6)


class _AcceptCompleter:
    """Turns a round into correct drafts of the chain and of every tree: seen where possible, else predicted.

    A tree's drafts are predicted from the next smaller tree's plus a gain; the gain is the drafter's
    forecast, or the prior growth curve without one, times the calibration learnt from rounds that saw both.
    """

    def __init__(self, draft_depth: int, tree_budgets: tuple[int, ...]) -> None:
        self.draft_depth = draft_depth
        self.tree_budgets = tree_budgets
        self.match_ct, self.trial_ct = PRIOR_CHAIN_DRAFTS, PRIOR_CHAIN_DRAFTS + 1
        self.by_forecast = [_Calibration() for _ in tree_budgets]
        self.by_growth = [_Calibration() for _ in tree_budgets]

    def predict(self, chain_drafts: float) -> list[float]:
        """What `complete` would say of a chain round with so many correct drafts and no forecast."""
        drafts = [chain_drafts]
        for level, calibration in enumerate(self.by_growth):
            floor = drafts[level] if level else 0.0
            drafts.append(floor + calibration.ratio * self._predicted_gain(level, drafts[level], None))
        return drafts

    def complete(self, feedback: RoundFeedback) -> list[float]:
        """Correct drafts of the chain, then of each tree budget in ascending order."""
        drafts = [self._chain_drafts(feedback)]
        seen_budget = feedback.plan.node_budget if feedback.plan.mode is Mode.TREE else 0
        calibrations = self.by_growth if feedback.surrogate is None else self.by_forecast
        for level, budget in enumerate(self.tree_budgets):
            floor = drafts[level] if level else 0.0
            predicted = self._predicted_gain(level, drafts[level], feedback.surrogate)
            if budget <= seen_budget:
                correct = float(sum(0 < index <= budget for index in feedback.accept_indices))
                calibrations[level].add(correct - floor, predicted)
            else:
                correct = floor + calibrations[level].ratio * predicted
            drafts.append(min(correct, budget, self.draft_depth))
        return drafts

    def _predicted_gain(self, level: int, below: float, surrogate: tuple[float, ...] | None) -> float:
        """Gain over the next smaller tree; the smallest tree is predicted whole, from the chain's drafts."""
        if surrogate is not None:
            return surrogate[level] - (surrogate[level - 1] if level else 0.0)
        budget = self.tree_budgets[level]
        if level == 0:
            return below * PRIOR_TREE_OVER_CHAIN * math.pow(budget / 8, PRIOR_GROWTH_EXPONENT)
        return below * (math.pow(budget / self.tree_budgets[level - 1], PRIOR_GROWTH_EXPONENT) - 1)

    def _chain_drafts(self, feedback: RoundFeedback) -> float:
        """The chain's correct drafts; past the censoring point, by the pooled chance of one more match."""
        matches, censored = feedback.num_chain_correct_drafts, feedback.chain_censored
        if feedback.plan.mode is Mode.CHAIN:
            matches, censored = feedback.num_accept_tokens - 1, False
        ended = not censored and matches < self.draft_depth
        self.match_ct = self.match_ct * CALIBRATION_DECAY + matches
        self.trial_ct = self.trial_ct * CALIBRATION_DECAY + matches + ended
        if not censored:
            return float(matches)
        chance = self.match_ct / self.trial_ct
        return matches + math.fsum(
            math.pow(chance, more) for more in range(1, self.draft_depth - matches + 1)
        )


class _DriftingMeans:
    """Means over a long window that jump to a short one when the two disagree beyond chance."""

    def __init__(self, prior: list[float]) -> None:
        self.slow, self.fast = list(prior), list(prior)
        self.slow_weight, self.fast_weight = PRIOR_ROUNDS, 0.0
        self.variance = 2.0

    def add(self, values: list[float]) -> bool:
        """Take one round's values; True if they had drifted."""
        self.slow_weight = min(self.slow_weight + 1, SLOW_ROUNDS)
        self.fast_weight = min(self.fast_weight + 1, FAST_ROUNDS)
        watched = min(1, len(values) - 1)
        surprise = values[watched] - self.slow[watched]
        self.variance += (surprise * surprise - self.variance) / self.slow_weight
        for means, weight in ((self.slow, self.slow_weight), (self.fast, self.fast_weight)):
            for level, value in enumerate(values):
                means[level] += (value - means[level]) / weight
        gap = self.fast[watched] - self.slow[watched]
        chance_gap = DRIFT_SIGMAS * math.sqrt(max(self.variance, MIN_VARIANCE) / self.fast_weight)
        drifted = self.fast_weight == FAST_ROUNDS and self.slow_weight > FAST_ROUNDS and abs(gap) > chance_gap
        if drifted:
            self.slow, self.slow_weight = list(self.fast), self.fast_weight
        return drifted

    @property
    def standard_error(self) -> float:
        """Of the estimate, in drafts."""
        return math.sqrt(self.variance / self.slow_weight)

    def idle(self) -> None:
        """A round without evidence: what is known ages."""
        self.slow_weight = max(self.slow_weight * IDLE_DECAY, min(self.slow_weight, IDLE_ROUNDS))


class NodeBudgetPolicy:
    """Chooses each round's plan for most expected tokens per millisecond; keeps its state over requests.

    `costs` names the plans to choose from and is corrected live. `draft_depth` is L. Equal seeds and
    equal feedback give equal choices. Raises `ConfigError` for a chain that is not L long, and for
    feedback that does not fit the table.
    """

    def __init__(self, costs: CostTable, draft_depth: int, seed: int = 0) -> None:
        check(is_int(draft_depth) and draft_depth >= 1, "draft_depth", draft_depth, "1 or more")
        for plan in costs.plans:
            check(
                plan.mode is not Mode.CHAIN or plan.node_budget == draft_depth,
                "plan", str(plan), f"a chain as long as the draft, chain:{draft_depth}",
            )  # fmt: skip
        self.costs = costs
        self.tree_budgets = tuple(plan.node_budget for plan in costs.plans if plan.mode is Mode.TREE)
        self._completer = _AcceptCompleter(draft_depth, self.tree_budgets)
        self._means = _DriftingMeans(self._completer.predict(PRIOR_CHAIN_DRAFTS))
        self._sighting_ct = dict.fromkeys(costs.plans, 0.0)
        self._run_ct = dict.fromkeys(costs.plans, 0.0)
        self._dearest = max(costs.plans, key=costs.cost_ms)
        self._random = random.Random(seed)
        self._probe_share = PROBE_SHARE_MAX
        self._credit_ms = 0.0
        self._rates = self._current_rates()
        self._base = self._next = max(costs.plans, key=self._rates.__getitem__)

    def choose(self) -> DraftPlan:
        """The next round's plan; the same until `update` is called."""
        return self._next

    def update(self, feedback: RoundFeedback) -> None:
        """Learn from a round, of whichever plan it was, and settle the next one."""
        if feedback.surrogate is not None:
            check(
                len(feedback.surrogate) == len(self.tree_budgets),
                "surrogate", feedback.surrogate, f"one number for each of the budgets {self.tree_budgets}",
            )  # fmt: skip
        self.costs.observe(feedback.plan, feedback.round_ms)
        if feedback.plan.mode is Mode.AR:
            self._means.idle()
            drafts = self._means.slow
        else:
            drafts = self._completer.complete(feedback)
            if self._means.add(drafts):
                self._probe_share = PROBE_SHARE_MAX
        self._earn(feedback.plan)
        self._pay(feedback.plan, drafts)
        self._note_sightings(feedback.plan)
        self._next = self._settle()

    def accept_length(self, plan: DraftPlan) -> float:
        """Tokens that a round of this plan is expected to commit, the bonus token included."""
        return 1.0 if plan.mode is Mode.AR else 1.0 + self._means.slow[self._level(plan)]

    def _level(self, plan: DraftPlan) -> int:
        return 0 if plan.mode is Mode.CHAIN else 1 + self.tree_budgets.index(plan.node_budget)

    def _current_rates(self) -> dict[DraftPlan, float]:
        """Expected tokens a millisecond of each plan."""
        return {plan: self.accept_length(plan) / self.costs.cost_ms(plan) for plan in self.costs.plans}

    def _settle(self) -> DraftPlan:
        self._rates = self._current_rates()
        best = max(self.costs.plans, key=self._rates.__getitem__)
        margin = HYSTERESIS
        if best.mode is Mode.AR and self._base.mode is not Mode.AR:
            margin += LEAVE_SIGMAS * self._means.standard_error / self.accept_length(self._base)
        if self._rates[best] > self._rates[self._base] * (1 + margin):
            self._base = best
        return self._probe() or self._base

    def _probe(self) -> DraftPlan | None:
        """The other plan that could be the best by most, if its worst loss is in credit.

        Plans the base tells nothing about always qualify, for the drafter may have changed; the rest
        only while their unknown cost leaves them a chance.
        """
        others = [plan for plan in self.costs.plans if plan != self._base]
        plan = max(others, key=self._hopeful_rate, default=None)
        if plan is None or (
            self._shows(self._base, plan) and self._hopeful_rate(plan) < self._rates[self._base]
        ):
            return None
        fewer_tokens = min(0.0, self.accept_length(plan) - self.accept_length(self._base))
        affordable = self._credit_ms >= max(0.0, self._loss_ms(plan, fewer_tokens))
        return plan if affordable and self._random.random() < PROBE_CHANCE else None

    def _hopeful_rate(self, plan: DraftPlan) -> float:
        doubt = COST_DOUBT / math.sqrt(1 + self._run_ct[plan])
        if not self._shows(self._base, plan):
            doubt += ACCEPT_DOUBT / math.sqrt(1 + self._sighting_ct[plan])
        return self._rates[plan] * (1 + doubt)

    def _loss_ms(self, plan: DraftPlan, extra_tokens: float) -> float:
        """What a round of this plan costs against one of the base that commits `extra_tokens` fewer."""
        extra_ms = self.costs.cost_ms(plan) - self.costs.cost_ms(self._base)
        return extra_ms - extra_tokens / self._rates[self._base]

    def _earn(self, plan: DraftPlan) -> None:
        """Each round earns a share of its time for probes, up to two of the dearest."""
        limit_ms = 2 * self.costs.cost_ms(self._dearest)
        self._credit_ms = min(self._credit_ms + self._probe_share * self.costs.cost_ms(plan), limit_ms)

    def _pay(self, plan: DraftPlan, drafts: list[float]) -> None:
        """Charge a probe its loss against the base in the very same round; a probe that paid off earns."""
        if plan == self._base:
            return
        tokens, base_tokens = (
            0.0 if plan.mode is Mode.AR else drafts[self._level(plan)] for plan in (plan, self._base)
        )
        loss_ms = self._loss_ms(plan, tokens - base_tokens)
        self._credit_ms -= loss_ms
        if loss_ms > 0:
            self._probe_share = max(self._probe_share * PROBE_BACKOFF, PROBE_SHARE_MIN)

    def _note_sightings(self, plan: DraftPlan) -> None:
        for other in self.costs.plans:
            self._sighting_ct[other] = self._sighting_ct[other] * SIGHT_DECAY + self._shows(plan, other)
            self._run_ct[other] = self._run_ct[other] * SIGHT_DECAY + (plan == other)

    @staticmethod
    def _shows(plan: DraftPlan, other: DraftPlan) -> bool:
        """Whether a round of `plan` tells how many drafts `other` would have got right."""
        if plan == other or other.mode is Mode.AR:
            return True
        return plan.mode is Mode.TREE and (other.mode is Mode.CHAIN or other.node_budget <= plan.node_budget)
