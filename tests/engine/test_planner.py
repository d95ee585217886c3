"""Which plan a round follows, and that the budget policy is told what the round did."""

import itertools
import math
from types import SimpleNamespace

import pytest

from ddtree.config import Mode, SamplingParams
from ddtree.engine import engine as engine_module
from ddtree.engine import stream as stream_module
from ddtree.engine.planner import Planner, fixed_plan
from ddtree.engine.readout import Readout
from ddtree.engine.request import Request
from ddtree.errors import ConfigError, DDTreeError
from ddtree.tree.budget import PLAIN, CostTable, DraftPlan, NodeBudgetPolicy
from engine_kit import (
    BLOCK_SIZE,
    PROMPT,
    Recorder,
    ScriptDrafter,
    plain,
    rounds_of,
    scripted_engine,
    tiny_engine,
    tiny_target,
)

CHAIN = DraftPlan(Mode.CHAIN, BLOCK_SIZE - 1)
BUDGETS = (4, 16)
TREES = [DraftPlan(Mode.TREE, budget) for budget in BUDGETS]
COSTS = {PLAIN: 1.0, CHAIN: 1.1, TREES[0]: 1.15, TREES[1]: 1.3}
SAMPLING = SamplingParams(max_tokens=60, temperature=1.0, seed=2)
AUTO = Request(PROMPT, SAMPLING, Mode.TREE, "auto")


class RecordingPolicy(NodeBudgetPolicy):
    """Goes through all plans in turn and keeps what it is told."""

    def __init__(self, costs=COSTS):
        super().__init__(CostTable(dict(costs)), BLOCK_SIZE - 1)
        self.turns = itertools.cycle([*TREES, CHAIN, PLAIN])
        self.told = []

    def choose(self):
        return next(self.turns)

    def update(self, feedback):
        super().update(feedback)
        self.told.append(feedback)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    ("mode", "node_budget", "block_size", "plan"),
    [
        (Mode.AR, "auto", 1, PLAIN),
        (Mode.AR, 16, 8, PLAIN),
        ("ar", "auto", 8, PLAIN),
        (Mode.CHAIN, "auto", 8, CHAIN),
        ("chain", 3, 8, CHAIN),
        (Mode.TREE, 1, 8, DraftPlan(Mode.TREE, 1)),
        ("tree", 1024, 8, DraftPlan(Mode.TREE, 1024)),
        (Mode.TREE, 16, 2, DraftPlan(Mode.TREE, 16)),
        (Mode.TREE, "auto", 8, None),
    ],
)
def test_what_a_request_fixes(mode, node_budget, block_size, plan):
    assert fixed_plan(mode, node_budget, block_size) == plan


@pytest.mark.parametrize("mode", [Mode.CHAIN, Mode.TREE, "tree"])
@pytest.mark.parametrize("node_budget", ["auto", 16])
def test_drafting_without_a_drafter_has_no_plan(mode, node_budget):
    with pytest.raises(
        ConfigError, match=f"mode='{mode}' is not allowed without a drafter: ar; name a drafter"
    ):
        fixed_plan(mode, node_budget, 1)


def test_a_fixed_plan_asks_for_no_forecast_and_learns_nothing():
    planner = Planner(CHAIN, None)
    assert [planner.next_plan() for _ in range(3)] == [CHAIN] * 3
    assert planner.budgets == ()
    planner.learn(CHAIN, Readout((1,), (0,), 7, (1, 2), ()), 1.0)
    assert planner.next_plan() == CHAIN


@pytest.mark.parametrize(
    ("accept_tokens", "matches", "censored"),
    [
        ((9,), 0, False),  # the first choice was wrong
        ((1, 2, 9), 2, False),
        ((1, 2), 2, True),  # all that was committed, the bonus too, was its first choice
        ((1,), 1, True),
        ((1, 8, 3), 1, False),  # right again after a mistake does not count
        ((1, 2, 3, 9), 3, False),
        ((1, 2, 3), 3, False),  # the whole chain: there is no more to know
    ],
)
def test_the_chain_is_censored_where_the_round_ended(accept_tokens, matches, censored):
    policy = RecordingPolicy()
    planner = Planner(None, policy)
    indices = tuple(range(len(accept_tokens)))
    planner.learn(TREES[1], Readout(accept_tokens, indices, 16, (1, 2, 3), (1.0, 2.0)), 1.2)
    (feedback,) = policy.told
    assert (feedback.num_chain_correct_drafts, feedback.chain_censored) == (matches, censored)
    assert (feedback.plan, feedback.round_ms) == (TREES[1], 1.2)
    assert (feedback.num_accept_tokens, feedback.accept_indices) == (len(accept_tokens), indices)


@pytest.mark.parametrize("plan", [*TREES, CHAIN, PLAIN, DraftPlan(Mode.TREE, 16)], ids=str)
def test_only_the_widest_tree_forecasts(plan):
    """A narrower tree lacks the nodes of the wider ones, and a chain's nodes are not the best ones."""
    policy = RecordingPolicy()
    planner = Planner(None, policy)
    assert planner.budgets == BUDGETS
    planner.learn(plan, Readout((5,), (0,), 4, (1, 2, 3), (0.5, 0.75)), 1.0)
    expected = (0.5, 0.75) if plan.node_budget == 16 else None
    assert policy.told[0].surrogate == expected


def test_a_chain_as_long_as_the_widest_tree_forecasts_nothing():
    policy = RecordingPolicy({PLAIN: 1.0, CHAIN: 1.1, TREES[0]: 1.15})
    Planner(None, policy).learn(CHAIN, Readout((5,), (0,), 7, (1, 2, 3), (0.5,)), 1.0)
    assert policy.told[0].surrogate is None


def test_policy_is_told_what_each_round_did(target):
    engine = scripted_engine(target, SAMPLING)
    engine._policy = policy = RecordingPolicy()
    rounds = rounds_of(engine, AUTO)
    assert [(seen.mode, seen.node_budget) for seen in rounds[:4]] == [
        (plan.mode, plan.node_budget) for plan in (*TREES, CHAIN, PLAIN)
    ]
    assert len(policy.told) == len(rounds) > 8
    for seen, told in zip(rounds, policy.told, strict=True):
        assert told.plan == DraftPlan(seen.mode, seen.node_budget)
        assert told.num_accept_tokens == len(seen.accept_tokens)
        assert told.accept_indices == seen.accept_indices
        assert told.round_ms > 0
        if seen.mode is not Mode.AR:
            first = seen.prefix_len + 1
            top1 = [int(engine.drafter._logits(first + i).argmax()) for i in range(BLOCK_SIZE - 1)]
            pairs = list(zip(top1, seen.accept_tokens, strict=False))
            same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            assert told.num_chain_correct_drafts == len(same)
            assert told.chain_censored == (len(same) == len(pairs) and len(pairs) < len(top1))
        if told.plan == TREES[1]:
            sums = [sum(math.exp(score) for score in seen.log_probs[1 : b + 1]) for b in BUDGETS]
            assert told.surrogate == pytest.approx(sums, rel=1e-5)
        else:
            assert told.surrogate is None
    assert any(told.chain_censored for told in policy.told)


def test_auto_says_what_plain_decoding_says(target, monkeypatch):
    """Several requests, one policy: it is measured once and what it learnt stays."""
    measured = []
    real_measure = engine_module.measure_costs

    def measure(*args):
        # Of these costs drafting is tried first, whatever this machine is busy with.
        plans = real_measure(*args).plans
        measured.append(CostTable({plan: 1 + 0.01 * plan.node_budget for plan in plans}))
        return measured[-1]

    monkeypatch.setattr(engine_module, "measure_costs", measure)
    engine = scripted_engine(target, SAMPLING)
    policies, drafted_ct = set(), 0
    for seed in (2, 3, 2):
        sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=seed)
        recorder = Recorder()
        request = Request(PROMPT, sampling, Mode.TREE, "auto", recorder)
        result = engine.generate(request)
        assert result.tokens == plain(target, sampling).tokens
        assert result.stats.verify_ct == len(recorder.rounds)
        drafted_ct += sum(seen.mode is not Mode.AR for seen in recorder.rounds)
        policies.add(id(engine.policy()))
    assert len(measured) == len(policies) == 1
    assert drafted_ct > 0
    assert engine.policy().costs is measured[0]


@pytest.mark.parametrize(("is_useful", "least", "most"), [(False, 0.9, 1.0), (True, 0.0, 0.1)])
def test_share_of_plain_rounds_follows_the_drafter(target, monkeypatch, is_useful, least, most):
    """With a clock that gives each plan its cost, a useless drafter ends in plain rounds."""
    script = plain(target, SAMPLING).tokens if is_useful else ()
    engine = tiny_engine(target, ScriptDrafter(script, len(PROMPT)))
    monkeypatch.setattr(engine_module, "measure_costs", lambda *_args: CostTable(dict(COSTS)))
    clock = SimpleNamespace(now_s=0.0)
    real_run = engine.runner.run

    def run(plan, *rest):
        clock.now_s += COSTS[plan] / 1e3
        return real_run(plan, *rest)

    monkeypatch.setattr(engine.runner, "run", run)
    monkeypatch.setattr(stream_module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    rounds = [rounds_of(engine, AUTO) for _ in range(3)][-1]
    num_plain = sum(seen.mode is Mode.AR for seen in rounds)
    assert least <= num_plain / len(rounds) <= most
    assert engine.policy().costs.cost_ms(PLAIN) == pytest.approx(COSTS[PLAIN])


def test_auto_while_another_request_runs_is_refused(target):
    engine = scripted_engine(target, SAMPLING)
    chunks = iter(engine.stream(Request(PROMPT, SAMPLING, Mode.TREE, 4)))
    next(chunks)
    with pytest.raises(DDTreeError, match="one request at a time"):
        engine.stream(AUTO)
    chunks.close()
    assert len(engine.generate(AUTO).tokens) == 60


def test_a_failed_measurement_frees_the_engine(target, monkeypatch):
    engine = scripted_engine(target, SAMPLING)

    def fail(*_args):
        raise RuntimeError("no clock")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "measure_costs", fail)
        with pytest.raises(RuntimeError, match="no clock"):
            engine.stream(AUTO)
    assert len(engine.generate(AUTO).tokens) == 60
