"""The plans a round can follow, and what a round of each costs: recorded before, corrected live."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddtree.config import MAX_NODE_BUDGET, Mode, check, is_int, is_number, parse_mode

COST_GAIN = 0.1  # weight of a new round time; more for an arm's first few
COST_CLIP = 0.25  # largest surprise believed at once, natural log
COST_WARM_ROUNDS = 8
COST_COMMON_SHARE = 0.8  # of a later change that is taken to hold for all arms (a longer context)


@dataclass(frozen=True, slots=True, order=True)
class DraftPlan:
    """How one round drafts: `ar` with budget 0, `chain` with L drafts, `tree` with a node budget."""

    mode: Mode
    node_budget: int

    def __post_init__(self) -> None:
        if self.mode is Mode.AR:
            check(self.node_budget == 0, "node_budget", self.node_budget, "0 in plain decoding")
        else:
            check(
                is_int(self.node_budget) and 1 <= self.node_budget <= MAX_NODE_BUDGET,
                "node_budget", self.node_budget, f"1 to {MAX_NODE_BUDGET} for a chain or tree",
            )  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> DraftPlan:
        """The plan written as `mode:budget`, such as `ar:0`, `chain:15` or `tree:64`."""
        mode, _, budget = text.partition(":")
        check(budget.isdecimal(), "plan", text, "mode:budget, such as ar:0, chain:15 or tree:64")
        return cls(parse_mode(mode), int(budget))

    def __str__(self) -> str:
        return f"{self.mode}:{self.node_budget}"


PLAIN = DraftPlan(Mode.AR, 0)


@dataclass(slots=True)
class CostTable:
    """Milliseconds a round (draft, build, verify, commit) of each plan, corrected by live round times.

    `recorded_ms` is what was measured before. A live time moves a plan's correction by a part of the
    clipped surprise, so an outlier moves it by a few percent at most. A plan's first rounds speak for
    itself and for plans never seen; later changes are mostly the context's, and move all.
    """

    recorded_ms: Mapping[DraftPlan, float]
    plans: tuple[DraftPlan, ...] = field(init=False)
    _correction: dict[DraftPlan, float] = field(init=False, repr=False)
    _seen_ct: dict[DraftPlan, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check(
            len(self.recorded_ms) > 0,
            "recorded_ms",
            self.recorded_ms,
            "one plan or more",
            "measure some first",
        )
        for plan, ms in self.recorded_ms.items():
            check(is_number(ms) and ms > 0, f"recorded_ms[{plan}]", ms, "a finite time above 0")
        self.plans = tuple(sorted(self.recorded_ms, key=lambda plan: (list(Mode).index(plan.mode), plan)))
        self._correction = dict.fromkeys(self.recorded_ms, 0.0)
        self._seen_ct = dict.fromkeys(self.recorded_ms, 0)

    @classmethod
    def from_record(cls, ms: Mapping[str, float]) -> CostTable:
        """The table of a `{"ar:0": ms, "chain:15": ms, "tree:16": ms}` record."""
        return cls({DraftPlan.parse(plan): value for plan, value in ms.items()})

    def to_record(self) -> dict[str, float]:
        """The table as it stands now, live corrections included, in `from_record`'s form."""
        return {str(plan): self.cost_ms(plan) for plan in self.recorded_ms}

    def cost_ms(self, plan: DraftPlan) -> float:
        """Milliseconds that a round of this plan is expected to take now."""
        if plan not in self.recorded_ms:
            check(False, "plan", str(plan), f"one of {', '.join(map(str, self.plans))}")
        return self.recorded_ms[plan] * math.exp(self._correction[plan])

    def observe(self, plan: DraftPlan, round_ms: float) -> None:
        """Take a measured round time into account."""
        check(is_number(round_ms) and round_ms > 0, "round_ms", round_ms, "a finite time above 0")
        surprise = math.log(round_ms / self.cost_ms(plan))
        seen = self._seen_ct[plan]
        step = max(COST_GAIN, 1 / (seen + 2)) * max(-COST_CLIP, min(COST_CLIP, surprise))
        self._seen_ct[plan] = seen + 1
        for other, other_seen in self._seen_ct.items():
            if other == plan or (seen < COST_WARM_ROUNDS and other_seen == 0):
                self._correction[other] += step
            elif seen >= COST_WARM_ROUNDS:
                self._correction[other] += COST_COMMON_SHARE * step
