"""What is measured at start-up, with a clock of the tests' own where a choice depends on times."""

import os

import pytest
import torch

from ddtree.config import Dtype, Mode, SamplingParams
from ddtree.engine import calibrate
from ddtree.engine.calibrate import choose_dtype, choose_threads, measure_costs, median_s, plans_for
from ddtree.engine.request import Request
from ddtree.errors import ConfigError
from ddtree.tree.budget import PLAIN, DraftPlan, NodeBudgetPolicy
from engine_kit import BLOCK_SIZE, CPU, VOCAB_SIZE, ScriptDrafter, real_engine, tiny_engine, tiny_target

CUDA = torch.device("cuda")
SMALL_CONTEXTS = [16, 64, 216]  # shorter than the probe's window, than its prefix, than both together


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def same_threads_after():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def allow_cores(monkeypatch, num_cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(num_cores)), raising=False)


def fake_clock(monkeypatch, seconds_by_threads):
    """Let a pass take the given time at each number of threads; returns the numbers that were tried."""
    tried = []

    def seconds(step, repeats):
        step()
        tried.append(torch.get_num_threads())
        return seconds_by_threads[tried[-1]]

    monkeypatch.setattr(calibrate, "median_s", seconds)
    return tried


def test_median_is_of_the_repeats_after_a_warm_up(monkeypatch):
    ticks = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(ticks))
    calls = []
    assert median_s(lambda: calls.append(1), repeats=3) == 2.0
    assert len(calls) == 4


@pytest.mark.parametrize("make", [Dtype, str])
@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtype_on_a_cpu_is_the_one_asked_for(make, name, dtype):
    assert choose_dtype(make(name), CPU) is dtype


@pytest.mark.parametrize("faster", [torch.float32, torch.bfloat16])
def test_auto_dtype_on_a_cpu_is_the_faster_one(monkeypatch, faster):
    monkeypatch.setattr(calibrate, "_linear_s", lambda dtype: 1.0 if dtype is faster else 2.0)
    assert choose_dtype("auto", CPU) is faster


def test_auto_dtype_on_a_cpu_is_measured():
    assert choose_dtype(Dtype.AUTO, CPU) in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("make", [Dtype, str])
def test_float16_on_a_cpu_is_refused(make):
    with pytest.raises(
        ConfigError, match="dtype='float16' is not allowed on a CPU: auto, bfloat16 or float32"
    ):
        choose_dtype(make("float16"), CPU)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_dtype_on_cuda_follows_the_device(monkeypatch, has_bfloat16):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert choose_dtype("auto", CUDA) is (torch.bfloat16 if has_bfloat16 else torch.float16)
    assert choose_dtype("float16", CUDA) is torch.float16
    assert choose_dtype("float32", CUDA) is torch.float32
    if has_bfloat16:
        assert choose_dtype("bfloat16", CUDA) is torch.bfloat16
        return
    with pytest.raises(ConfigError, match="dtype='bfloat16' is not allowed on this GPU: auto, float16 or"):
        choose_dtype("bfloat16", CUDA)


@pytest.mark.parametrize("max_context", SMALL_CONTEXTS)
def test_threads_are_timed_in_any_context_and_set(tmp_path, monkeypatch, max_context):
    allow_cores(monkeypatch, 2)
    pair = real_engine(tmp_path, max_context).pair  # its rotary tables end a short way past the context
    pair.kv_cache.data.fill_(float("nan"))
    best = choose_threads(pair, max_context)
    assert best in (1, 2)
    assert torch.get_num_threads() == best
    assert pair.kv_cache.data[:, :, :, :max_context].isfinite().all()  # what nobody wrote was not read


def test_one_core_means_one_thread(target, monkeypatch):
    allow_cores(monkeypatch, 1)
    tried = fake_clock(monkeypatch, {1: 1.0})
    assert choose_threads(tiny_engine(target, None).pair, 256) == 1
    assert tried == [1]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.00, 2: 0.96, 4: 0.96}, 1),
        ({1: 1.00, 2: 0.96, 4: 0.94}, 4),
        ({1: 1.00, 2: 0.94, 4: 0.90}, 2),
        ({1: 1.00, 2: 0.50, 4: 0.30}, 4),
        ({1: 1.00, 2: 2.00, 4: 3.00}, 1),
        ({1: 1.00, 2: 0.60, 3: 0.50}, 3),
    ],
)
def test_more_threads_must_win_by_five_percent(target, monkeypatch, seconds, best):
    allow_cores(monkeypatch, max(seconds))
    tried = fake_clock(monkeypatch, seconds)
    assert choose_threads(tiny_engine(target, None).pair, 256) == best
    assert tried == sorted(seconds)
    assert torch.get_num_threads() == best


def test_plans_are_plain_the_whole_chain_and_trees(target):
    pair = tiny_engine(target, ScriptDrafter((), 0)).pair
    trees = {CPU: (8, 16, 32, 64), CUDA: (15, 31, 63, 127)}
    for device, budgets in trees.items():
        plans = plans_for(pair, device)
        assert plans[:2] == [PLAIN, DraftPlan(Mode.CHAIN, BLOCK_SIZE - 1)]
        assert plans[2:] == [DraftPlan(Mode.TREE, budget) for budget in budgets]


@pytest.mark.parametrize("max_context", SMALL_CONTEXTS)
def test_every_plan_has_a_cost_and_the_engine_is_as_before(tmp_path, max_context):
    engine = real_engine(tmp_path, max_context)
    prompt = tuple(range(10))
    request = Request(prompt, SamplingParams(max_tokens=6, temperature=1.0), Mode.TREE, 16)
    before = engine.generate(request).tokens
    engine.pair.kv_cache.data.fill_(float("nan"))
    with torch.inference_mode():
        costs = measure_costs(engine.pair, engine.sequence, engine.runner, engine.max_context_tokens)
    assert list(costs.plans) == plans_for(engine.pair, CPU)
    assert all(costs.cost_ms(plan) > 0 for plan in costs.plans)
    assert NodeBudgetPolicy(costs, BLOCK_SIZE - 1).choose() in costs.plans
    assert engine.pair.kv_cache.data[:, :, :, : max_context - 1].isfinite()[:, :, :, :200].all()
    assert engine.generate(request).tokens == before


def test_costs_are_of_whole_rounds_of_each_plan(target, monkeypatch):
    """Each plan is timed from the same place, with the budgets of live rounds."""
    engine = tiny_engine(target, ScriptDrafter(range(VOCAB_SIZE), 0))
    runs = []
    real_run = engine.runner.run

    def run(plan, chooser, budgets):
        runs.append((plan, int(engine.sequence.prefix_len), budgets))
        return real_run(plan, chooser, budgets)

    monkeypatch.setattr(engine.runner, "run", run)
    monkeypatch.setattr(calibrate, "median_s", lambda step, repeats: (step(), step(), len(runs))[-1])
    costs = measure_costs(engine.pair, engine.sequence, engine.runner, 256)
    plans = plans_for(engine.pair, CPU)
    assert runs == [(plan, 200, (8, 16, 32, 64)) for plan in plans for _ in range(2)]
    assert [costs.cost_ms(plan) for plan in plans] == [2e3 * (i + 1) for i in range(len(plans))]
