"""Choices that are measured at start-up: number format, CPU threads, what a round of each plan costs."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ddtree.config import Dtype, Mode, SamplingParams
from ddtree.engine.sampling import TokenChooser
from ddtree.engine.sequence import ModelPair, Sequence
from ddtree.errors import ConfigError
from ddtree.layers.linear import Linear
from ddtree.layers.window import Window
from ddtree.tree.budget import PLAIN, CostTable, DraftPlan

if TYPE_CHECKING:
    from ddtree.engine.round_runner import RoundRunner

logger = logging.getLogger(__name__)

CPU_BUDGETS = (8, 16, 32, 64)
CUDA_BUDGETS = (15, 31, 63, 127)  # verify widths of 16, 32, 64 and 128 rows fill the matrix units' tiles
PROBE_PREFIX_TOKENS = 200
PROBE_WIDTH = 17


def settle_cpu_math() -> None:
    """Make the process's first exp and log calls on one thread.

    With some builds of the math library several threads making the first call can get a less precise
    variant in that call (pytorch/pytorch issue 188792), which could change one draw of sampling noise.
    """
    for dtype in (torch.float32, torch.float64):
        torch.ones(1, dtype=dtype).exp().log()


def median_s(step: Callable[[], object], repeats: int) -> float:
    """Median seconds of a step on the host, after one warm-up call."""
    step()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a setting; on a CPU `auto` is the faster of bfloat16 and float32, measured now.

    Raises:
        ConfigError: float16 on a CPU, bfloat16 on a CUDA device without it.
    """
    wanted = Dtype(name)
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if wanted is Dtype.BFLOAT16 and not has_bfloat16:
            raise ConfigError("dtype='bfloat16' is not allowed on this GPU: auto, float16 or float32")
        if wanted is Dtype.AUTO:
            return torch.bfloat16 if has_bfloat16 else torch.float16
    elif wanted is Dtype.FLOAT16:
        raise ConfigError("dtype='float16' is not allowed on a CPU: auto, bfloat16 or float32")
    elif wanted is Dtype.AUTO:
        return min((torch.bfloat16, torch.float32), key=_linear_s)
    return {
        Dtype.FLOAT32: torch.float32,
        Dtype.BFLOAT16: torch.bfloat16,
        Dtype.FLOAT16: torch.float16,
    }[wanted]


def _linear_s(dtype: torch.dtype) -> float:
    """Seconds of one linear map of a verify pass."""
    linear = Linear(torch.full((1024, 1024), 0.01, dtype=dtype))
    rows = torch.full((PROBE_WIDTH, 1024), 0.01, dtype=dtype)
    return median_s(lambda: linear(rows), repeats=9)


def choose_threads(pair: ModelPair, max_context_tokens: int) -> int:
    """Set the number of CPU threads at which a verify pass is fastest, and return it.

    Powers of two up to the cores this process may use are timed, fewest first; more threads must win
    by 5 %, since idle cores are worth having.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = sorted({cores, *(1 << i for i in range(cores.bit_length()) if 1 << i <= cores)})
    width = min(PROBE_WIDTH, max_context_tokens)
    start = min(PROBE_PREFIX_TOKENS, max_context_tokens - width)
    window = Window.at(start, torch.arange(start, start + width), None)
    pair.kv_cache.data[:, :, :, :start].zero_()
    tokens = torch.zeros(width, dtype=torch.int64)
    best, best_s = counts[0], float("inf")
    for count in counts:
        torch.set_num_threads(count)
        seconds = median_s(lambda: pair.target.forward(tokens, window, pair.kv_cache, ()), repeats=3)
        if seconds < 0.95 * best_s:
            best, best_s = count, seconds
    torch.set_num_threads(best)
    logger.info(
        "CPU threads: %d of %d cores, verify pass of %d tokens %.1f ms",
        best,
        cores,
        PROBE_WIDTH,
        best_s * 1e3,
    )
    return best


def measure_costs(
    pair: ModelPair, sequence: Sequence, runner: RoundRunner, max_context_tokens: int
) -> CostTable:
    """Milliseconds of a whole round of each plan that the policy may choose, after 200 tokens if they fit."""
    device = sequence.root_token.device
    chooser = TokenChooser(SamplingParams(), (0,), pair.target.info.vocab_size, device)
    prefix_len = min(PROBE_PREFIX_TOKENS, max_context_tokens - 1)
    pair.kv_cache.data[:, :, :, :prefix_len].zero_()
    plans = plans_for(pair, device)
    # The budgets of live rounds: they are part of what a CUDA graph captures.
    budgets = tuple(plan.node_budget for plan in plans if plan.mode == Mode.TREE)
    costs: dict[DraftPlan, float] = {}
    for plan in plans:

        def step(plan: DraftPlan = plan) -> None:
            sequence.begin(0, prefix_len)
            runner.run(plan, chooser, budgets)

        costs[plan] = median_s(step, repeats=3 if device.type == "cpu" else 9) * 1e3
    logger.info("round costs: %s", ", ".join(f"{plan} {ms:.2f} ms" for plan, ms in costs.items()))
    return CostTable(costs)


def plans_for(pair: ModelPair, device: torch.device) -> list[DraftPlan]:
    """Plans among which the budget policy chooses on a device."""
    budgets = CPU_BUDGETS if device.type == "cpu" else CUDA_BUDGETS
    trees = [DraftPlan(Mode.TREE, budget) for budget in budgets]
    return [PLAIN, DraftPlan(Mode.CHAIN, pair.block_size - 1), *trees]
