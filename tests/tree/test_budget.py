"""The node budget policy against texts whose acceptance is known; no clock anywhere."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from ddtree.config import Mode
from ddtree.errors import ConfigError
from ddtree.tree.budget import CostTable, DraftPlan, NodeBudgetPolicy, RoundFeedback, chain_counterfactual

DRAFT_DEPTH = 15
BUDGETS = (8, 16, 32, 64)
FLAT = {"ar:0": 4.0, "chain:15": 5.1, "tree:8": 5.1, "tree:16": 5.15, "tree:32": 5.3, "tree:64": 5.6}
LINEAR = {"ar:0": 8.0, "chain:15": 16.5, "tree:8": 13.0, "tree:16": 17.0, "tree:32": 25.0, "tree:64": 41.0}
SLOW_BUILD = {"ar:0": 4.0, "chain:15": 5.1, "tree:8": 9.0, "tree:16": 9.2, "tree:32": 9.5, "tree:64": 10.0}
WIDE_IS_FREE = dict(zip(FLAT, (40.0, 42.0, 42.0, 42.1, 42.2, 42.3), strict=True))
# Chance that the true token of a depth is in the draft: by the chain, then by the trees at BUDGETS.
GOOD = (0.59, 0.65, 0.68, 0.71, 0.73)
USELESS = (0.0,) * 5

Quality = Callable[[int], tuple[float, ...]]


class World:
    """A text of known acceptance and true costs; plays a policy or a fixed plan over it."""

    def __init__(self, costs: dict[str, float], quality: Quality, num_tokens: int, seed: int) -> None:
        self.costs = {DraftPlan.parse(plan): ms for plan, ms in costs.items()}
        rng = random.Random(seed)
        self.drafts = [self._draw(quality(position), rng) for position in range(num_tokens)]

    @staticmethod
    def _draw(chances: tuple[float, ...], rng: random.Random) -> list[int]:
        draws = [rng.random() for _ in range(DRAFT_DEPTH)]
        limits = (DRAFT_DEPTH, *(min(budget, DRAFT_DEPTH) for budget in BUDGETS))
        return [
            next((depth for depth, draw in enumerate(draws[:limit]) if draw >= chance), limit)
            for chance, limit in zip(chances, limits, strict=True)
        ]

    def tokens(self, plan: DraftPlan, position: int) -> int:
        if plan.mode is Mode.AR:
            return 1
        level = 0 if plan.mode is Mode.CHAIN else 1 + BUDGETS.index(plan.node_budget)
        return 1 + self.drafts[position][level]

    def feedback(self, plan: DraftPlan, position: int, round_ms: float) -> RoundFeedback:
        tokens, drafts = self.tokens(plan, position), self.drafts[position]
        if plan.mode is not Mode.TREE:
            return RoundFeedback(plan, tokens, round_ms, num_chain_correct_drafts=tokens - 1)
        path, below = [0], 0
        for budget, correct in zip(BUDGETS, drafts[1:], strict=True):
            if budget <= plan.node_budget:
                path.extend(below + 1 + step for step in range(correct + 1 - len(path)))
                below = budget
        chain = min(drafts[0], tokens)
        return RoundFeedback(plan, tokens, round_ms, tuple(path), chain, chain == tokens < DRAFT_DEPTH)

    def fixed_ms(self, plan: DraftPlan) -> float:
        position, total_ms = 0, 0.0
        while position < len(self.drafts):
            total_ms += self.costs[plan]
            position += self.tokens(plan, position)
        return total_ms

    def play(
        self, policy: NodeBudgetPolicy, seen_ms: Callable[[int, float], float] = lambda _, ms: ms
    ) -> tuple[float, list[tuple[int, DraftPlan]]]:
        history: list[tuple[int, DraftPlan]] = []
        position, total_ms = 0, 0.0
        while position < len(self.drafts):
            plan = policy.choose()
            history.append((position, plan))
            total_ms += self.costs[plan]
            policy.update(self.feedback(plan, position, seen_ms(len(history), self.costs[plan])))
            position += self.tokens(plan, position)
        return total_ms, history

    def regret(
        self, policy: NodeBudgetPolicy, seen_ms: Callable[[int, float], float] = lambda _, ms: ms
    ) -> float:
        return self.play(policy, seen_ms)[0] / min(map(self.fixed_ms, self.costs)) - 1


def make_policy(costs: dict[str, float], seed: int = 0) -> NodeBudgetPolicy:
    return NodeBudgetPolicy(CostTable.from_record(costs), DRAFT_DEPTH, seed)


def always(chances: tuple[float, ...]) -> Quality:
    return lambda position: chances


def usual_plan(history: list[tuple[int, DraftPlan]], start: int, end: int) -> str:
    return str(Counter(plan for position, plan in history if start <= position < end).most_common(1)[0][0])


def alternating(position: int) -> tuple[float, ...]:
    return GOOD if position // 2000 % 2 else USELESS


def wave(position: int) -> tuple[float, ...]:
    return tuple(chance * (0.6 + 0.4 * math.sin(position / 300)) for chance in GOOD)


def spike(round_ct: int, ms: float) -> float:
    return ms * (50 if round_ct % 40 == 0 else 1)


def test_equal_seeds_and_feedback_give_equal_choices() -> None:
    world = World(FLAT, always(GOOD), 1500, seed=1)
    runs = [world.play(make_policy(FLAT, seed)) for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_choose_is_stable_until_update() -> None:
    policy = make_policy(FLAT)
    assert policy.choose() == policy.choose()


@pytest.mark.parametrize(
    "plans", [("ar:0",), ("chain:15",), ("ar:0", "tree:16"), ("chain:15", "tree:8", "tree:64")]
)
def test_chooses_only_plans_of_the_table(plans: tuple[str, ...]) -> None:
    costs = {plan: FLAT[plan] for plan in plans}
    _, history = World(FLAT, always(GOOD), 1500, seed=2).play(make_policy(costs))
    assert {str(plan) for _, plan in history} <= set(plans)


@pytest.mark.parametrize(
    ("costs", "chances", "best"),
    [
        (FLAT, USELESS, "ar:0"),
        (LINEAR, USELESS, "ar:0"),
        (LINEAR, GOOD, "tree:8"),
        (SLOW_BUILD, GOOD, "chain:15"),
        (WIDE_IS_FREE, GOOD, "tree:64"),
        (FLAT, (0.999,) * 5, "chain:15"),
    ],
)
def test_settles_on_the_best_plan(costs: dict[str, float], chances: tuple[float, ...], best: str) -> None:
    world = World(costs, always(chances), 6000, seed=5)
    _, history = world.play(make_policy(costs))
    assert min(world.costs, key=world.fixed_ms) == DraftPlan.parse(best)
    assert usual_plan(history, 2000, 6000) == best


def test_regret_is_at_most_three_percent() -> None:
    for costs in (FLAT, LINEAR, SLOW_BUILD, WIDE_IS_FREE):
        for quality in (always(GOOD), always(USELESS), alternating, wave):
            regret = World(costs, quality, 6000, seed=1).regret(make_policy(costs, seed=1))
            assert regret <= 0.03, (costs, regret)


@pytest.mark.parametrize("costs", [FLAT, LINEAR])
def test_probes_of_a_useless_drafter_stay_within_their_share(costs: dict[str, float]) -> None:
    world = World(costs, always(USELESS), 6000, seed=7)
    assert 0 < world.regret(make_policy(costs)) <= 0.02


def test_notices_a_drafter_that_fails_and_recovers() -> None:
    world = World(FLAT, lambda position: USELESS if 3000 <= position < 6000 else GOOD, 9000, seed=8)
    _, history = world.play(make_policy(FLAT))
    assert usual_plan(history, 1000, 3000).startswith("tree")
    assert usual_plan(history, 3200, 6000) == "ar:0"
    assert usual_plan(history, 6500, 9000).startswith("tree")


def test_learns_that_wider_trees_gain_nothing() -> None:
    same = (0.3, 0.65, 0.65, 0.65, 0.65)
    costs = FLAT | {"tree:16": 5.4, "tree:32": 5.5, "tree:64": 5.6}
    policy = make_policy(costs)
    World(costs, always(same), 6000, seed=9).play(policy)
    lengths = [policy.accept_length(DraftPlan(Mode.TREE, budget)) for budget in BUDGETS]
    assert max(lengths) / min(lengths) < 1.06


def test_forecasts_that_are_too_high_are_corrected() -> None:
    policy = make_policy(LINEAR)
    world = World(LINEAR, always(GOOD), 4000, seed=10)
    widest, narrow = DraftPlan(Mode.TREE, 64), DraftPlan(Mode.TREE, 8)
    forecast = (2.0, 4.0, 8.0, 12.0)
    for position in range(300):
        plan = widest if position < 150 else narrow
        seen = world.feedback(plan, position, world.costs[plan])
        policy.update(
            RoundFeedback(
                plan, seen.num_accept_tokens, seen.round_ms, seen.accept_indices,
                seen.num_chain_correct_drafts, seen.chain_censored, forecast,
            )
        )  # fmt: skip
    true_length = sum(world.tokens(widest, position) for position in range(300)) / 300
    assert policy.accept_length(widest) == pytest.approx(true_length, rel=0.1)


def test_a_tree_round_tells_all_smaller_trees_exactly() -> None:
    policy = make_policy(WIDE_IS_FREE)
    for _ in range(400):
        policy.update(RoundFeedback(DraftPlan(Mode.TREE, 64), 5, 42.3, (0, 3, 8, 16, 33), 2))
    lengths = [policy.accept_length(plan) for plan in policy.costs.plans]
    assert lengths == pytest.approx([1, 3, 3, 4, 4, 5], abs=0.03)


def tree_8_round(num_accept_tokens: int) -> RoundFeedback:
    path = tuple(range(num_accept_tokens))
    return RoundFeedback(DraftPlan(Mode.TREE, 8), num_accept_tokens, 5.1, path, num_accept_tokens, True)


def test_an_abrupt_loss_is_believed_within_25_rounds() -> None:
    policy = make_policy(FLAT)
    for round_ct in range(400):
        policy.update(tree_8_round(3 + 2 * (round_ct % 2)))
    for _ in range(25):
        policy.update(tree_8_round(1))
    assert policy.accept_length(DraftPlan(Mode.TREE, 8)) < 2.2


def test_old_evidence_fades_in_plain_decoding() -> None:
    policy = make_policy(FLAT)
    for _ in range(200):
        policy.update(tree_8_round(1))
    for _ in range(600):
        policy.update(RoundFeedback(DraftPlan(Mode.AR, 0), 1, 4.0))
    for _ in range(3):
        policy.update(tree_8_round(5))
    assert policy.accept_length(DraftPlan(Mode.TREE, 8)) > 2


def test_a_chain_that_outgrows_the_tree_is_foreseen() -> None:
    policy = make_policy(FLAT)
    for _ in range(400):
        policy.update(tree_8_round(9))
    assert policy.accept_length(DraftPlan(Mode.CHAIN, 15)) > 12


def test_round_time_outliers_do_not_change_the_choice() -> None:
    for costs in (FLAT, LINEAR, SLOW_BUILD):
        world = World(costs, always(GOOD), 6000, seed=11)
        assert world.regret(make_policy(costs), seen_ms=spike) <= 0.03


def test_a_wrong_cost_table_is_corrected_by_live_times() -> None:
    wrong = LINEAR | {"tree:8": 17.0, "tree:16": 14.5}
    world = World(LINEAR, always(GOOD), 6000, seed=12)
    _, history = world.play(make_policy(wrong))
    assert usual_plan(history, 3000, 6000) == "tree:8"


def test_costs_that_grow_together_keep_their_order() -> None:
    table = CostTable.from_record(FLAT)
    tree, plain = DraftPlan(Mode.TREE, 16), DraftPlan(Mode.AR, 0)
    for _ in range(20):
        table.observe(tree, 5.15)
    for _ in range(200):
        table.observe(tree, 5.15 * 1.5)
    assert table.cost_ms(tree) == pytest.approx(5.15 * 1.5, rel=0.01)
    assert table.cost_ms(plain) > 4.0 * 1.3
    assert CostTable.from_record(table.to_record()).cost_ms(plain) == table.cost_ms(plain)


@pytest.mark.parametrize(
    ("top1", "committed", "expected"),
    [
        ((5, 6, 7), (5, 9), (1, False)),
        ((5, 6, 7), (5, 6), (2, True)),
        ((5, 6, 7), (5, 6, 7, 1), (3, False)),
        ((0, 6), (0,), (1, True)),
        ((5, 6), (4,), (0, False)),
    ],
)
def test_chain_counterfactual(
    top1: tuple[int, ...], committed: tuple[int, ...], expected: tuple[int, bool]
) -> None:
    assert chain_counterfactual(top1, committed) == expected


def test_plan_round_trips_through_text() -> None:
    for text in FLAT:
        assert str(DraftPlan.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["tree", "tree:0", "tree:-1", "ar:1", "wood:3", "tree:1e3", "tree:100000", ""]
)
def test_bad_plans_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        DraftPlan.parse(text)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf, True])
def test_bad_costs_are_refused(ms: float) -> None:
    with pytest.raises(ConfigError, match="tree:16"):
        CostTable.from_record({"ar:0": 1.0, "tree:16": ms})
    with pytest.raises(ConfigError, match="round_ms"):
        CostTable.from_record(FLAT).observe(DraftPlan(Mode.AR, 0), ms)


def test_misfits_are_refused() -> None:
    with pytest.raises(ConfigError, match="recorded_ms"):
        CostTable({})
    with pytest.raises(ConfigError, match="chain:15"):
        NodeBudgetPolicy(CostTable.from_record(FLAT), draft_depth=7)
    with pytest.raises(ConfigError, match="tree:128"):
        make_policy(FLAT).update(RoundFeedback(DraftPlan(Mode.TREE, 128), 1, 5.0))
    with pytest.raises(ConfigError, match="surrogate"):
        make_policy(FLAT).update(RoundFeedback(DraftPlan(Mode.TREE, 8), 1, 5.0, surrogate=(1.0,)))
    with pytest.raises(ConfigError, match="num_accept_tokens"):
        RoundFeedback(DraftPlan(Mode.AR, 0), 0, 5.0)
