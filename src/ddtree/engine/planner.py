"""Which plan each round follows: a fixed one, or the node budget policy's choice."""

from __future__ import annotations

from typing import Literal

from ddtree.config import Mode
from ddtree.engine.readout import Readout
from ddtree.errors import ConfigError
from ddtree.tree.budget import (
    PLAIN,
    DraftPlan,
    NodeBudgetPolicy,
    RoundFeedback,
    chain_counterfactual,
)


class Planner:
    """Gives each round its plan; with a policy it passes back what the round taught.

    Attributes:
        budgets: tree budgets whose forecast the policy wants, empty for a fixed plan.
    """

    def __init__(self, fixed: DraftPlan | None, policy: NodeBudgetPolicy | None) -> None:
        self._fixed, self._policy = fixed, policy
        self.budgets: tuple[int, ...] = policy.tree_budgets if policy is not None else ()

    def next_plan(self) -> DraftPlan:
        """The plan of the next round."""
        if self._policy is not None:
            return self._policy.choose()
        assert self._fixed is not None
        return self._fixed

    def learn(self, plan: DraftPlan, readout: Readout, round_ms: float) -> None:
        """Tell the policy what a round did."""
        if self._policy is None:
            return
        matches, censored = chain_counterfactual(readout.top1_tokens, readout.accept_tokens)
        # A tree narrower than a budget forecasts nothing for it, and the chain orders its nodes by depth.
        is_full = plan.mode == Mode.TREE and plan.node_budget >= max(self.budgets)
        self._policy.update(
            RoundFeedback(
                plan=plan,
                num_accept_tokens=len(readout.accept_tokens),
                round_ms=round_ms,
                accept_indices=readout.accept_indices,
                num_chain_correct_drafts=matches,
                chain_censored=censored,
                surrogate=readout.surrogate if is_full else None,
            )
        )


def fixed_plan(mode: Mode, node_budget: int | Literal["auto"], block_size: int) -> DraftPlan | None:
    """The plan of a request that leaves nothing to the policy, or None for budget "auto".

    Raises:
        ConfigError: a drafted mode without a drafter (block_size 1).
    """
    if mode == Mode.AR:
        return PLAIN
    if block_size < 2:
        raise ConfigError(
            f"mode={str(mode)!r} is not allowed without a drafter: ar; name a drafter or use mode ar"
        )
    if mode == Mode.CHAIN:
        return DraftPlan(Mode.CHAIN, block_size - 1)
    return None if node_budget == "auto" else DraftPlan(Mode.TREE, node_budget)
