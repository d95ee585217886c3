"""Times the cost model is fitted to: those under results/, and those that others published.

python scripts/roadmap_points.py      # prints every point with its leave-one-out prediction
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmark_tables import Results

from ddtree.config import Mode
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.cost_catalogue import A100, B200, H200, PAIRS, RTX_PRO_6000
from ddtree.tree.cost_fit import CostPoint, Prediction, describe, fit, leave_one_out
from ddtree.tree.cost_model import Calibration, DraftPair, GpuSpec, Load, pass_cost, round_cost

RESULTS = Path(__file__).parents[1] / "results"
OURS = PAIRS["SmolLM2-135M"]
CHAIN = OURS.chain

# Where the fits start. Shares are what well-tuned large kernels reach; latencies are of the order of a few
# kernels of 3 to 5 microseconds a layer. The points decide; what they do not show stays as it is here.
START = Calibration(
    bandwidth_share=0.75, flop_share=0.5, layer_latency_s=30e-6, tree_s=50e-6, state_bandwidth_share=0.2,
    step_host_s=0.5e-3, round_host_s=2e-3, request_host_s=20e-6, overlaps_host=True, prefill_s=10e-3,
)  # fmt: skip
EMBEDDED_START = replace(
    START,
    layer_latency_s=12e-6,
    step_host_s=0.1e-3,
    round_host_s=0.15e-3,
    request_host_s=0.0,
    overlaps_host=False,
    prefill_s=0.0,
)
EMBEDDED_FREE = ("bandwidth_share", "flop_share", "layer_latency_s", "tree_s", "step_host_s", "round_host_s")
SGLANG_FREE = (*EMBEDDED_FREE, "request_host_s", "prefill_s")
# All-reduces of large messages over PCIe on eight RTX PRO 6000: 41 GB/s of 63 (voipmonitor/rtx6kpro).
LINK_SHARE = 0.65
# A 135M target says nothing about the shares of large kernels, and large ones little about the host.
LARGE_FREE = ("bandwidth_share", "flop_share", "state_bandwidth_share")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration, the points it was fitted to, and each point as foretold without it."""

    title: str
    calibration: Calibration
    predictions: tuple[Prediction, ...]


def read(name: str) -> Results:
    """A file under results/."""
    found: Results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def round_point(
    name: str, seconds: float, pair: DraftPair, gpu: GpuSpec, plan: DraftPlan, load: Load
) -> CostPoint:
    """A whole round's or plain step's time."""
    return CostPoint(name, seconds, lambda c: round_cost(pair, gpu, c, load, plan).total_s)


def plan_of(arm: str) -> DraftPlan | None:
    """The plan of an arm's name in a results file; None for those that mix plans."""
    if arm in ("ar", "plain"):
        return PLAIN
    if arm in ("chain", "dflash"):
        return CHAIN
    budget = arm.partition(":")[2]
    return DraftPlan(Mode.TREE, int(budget)) if budget.isdecimal() else None


def embedded_points() -> Iterator[CostPoint]:
    """The embedded engine on one H200: whole rounds, and the bare stack of layers by rows."""
    for name, arms in read("engine_gpu")["sets"].items():
        for arm, row in arms.items():
            if plan := plan_of(arm):
                load = Load(1, 250)
                yield round_point(f"{arm} {name}", row["round_ms"] / 1e3, OURS, H200, plan, load)
    for tiles, modes in read("decoder_gpu")["stack_us"].items():
        kind, _, rows = tiles.partition(" n=")
        if kind == "best":
            for context in (300, 1500):
                seconds = min(us for mode, us in modes.items() if mode.endswith(f"@{context}")) / 1e6
                yield CostPoint(f"layers, {rows} rows at {context}", seconds, stack(int(rows), context))


def stack(rows: int, context: int) -> Callable[[Calibration], float]:
    """The target's layers without its head."""
    target = OURS.target
    headless = replace(target, head_weights=0.0, num_layers=target.num_layers - 1)  # a head counts as a layer
    return lambda c: pass_cost(headless, H200, c, Load(1, context), rows).total_s


def sglang_points() -> Iterator[CostPoint]:
    """Stock SGLang on one H200: passes of the profile, and rounds of the speed table."""
    for arm, cell in read("sglang_profile")["cells"].items():
        name, _, requests = arm.rpartition(" ")
        if (plan := plan_of(name)) and requests == "1" and "steps_us" in cell:
            yield from profile_points(arm, cell, plan)
    yield from bench_points(read("sglang_bench")["cells"])


def profile_points(arm: str, cell: Results, plan: DraftPlan) -> Iterator[CostPoint]:
    load, width = Load(1, 200), OURS.verify_width(plan)
    steps = cell["steps_us"]
    if "target pass" in steps:
        yield CostPoint(
            f"target pass, {arm}", steps["target pass"] / 1e6,
            lambda c: pass_cost(OURS.target, H200, c, load, width).total_s,
        )  # fmt: skip
    if plan.mode is not Mode.AR and "draft pass" in steps:
        yield CostPoint(
            f"draft pass, {arm}", steps["draft pass"] / 1e6,
            lambda c: pass_cost(OURS.drafter, H200, c, load, OURS.block_size).total_s,
        )  # fmt: skip
    if "busy_us" in cell:
        yield CostPoint(
            f"device busy, {arm}", cell["busy_us"] / 1e6,
            lambda c: round_cost(OURS, H200, c, load, plan).device_s,
        )  # fmt: skip


def bench_points(cells: Results) -> Iterator[CostPoint]:
    """The mean time of a step over the cells of an arm and concurrency, and its share of the prefills."""
    by_arm: dict[tuple[str, int], list[Results]] = {}
    for name, cell in cells.items():
        arm, at_once, _, _ = name.split(" ")
        by_arm.setdefault((arm, int(at_once)), []).append(cell)
    for (arm, requests), found in sorted(by_arm.items(), key=lambda item: (item[0][1], item[0][0])):
        plan = plan_of(arm) if not arm.startswith("embedded") else None
        if plan:
            yield bench_point(arm, requests, plan, [steps_of(cell, requests) for cell in found])


def steps_of(cell: Results, requests: int) -> tuple[float, float, float, int]:
    """Seconds a step, requests in it on average, steps, and prompts of one cell.

    The requests of a cell run side by side, so it takes as many steps as its longest request, or as all
    of them together over those at once.
    """
    counts = cell["rounds"] if sum(cell["rounds"]) else cell["tokens"]
    steps = max(sum(counts) / requests, max(counts))
    return cell["wall_s"] / steps, sum(counts) / steps, steps, len(counts)


def bench_point(
    arm: str, requests: int, plan: DraftPlan, cells: Sequence[tuple[float, float, float, int]]
) -> CostPoint:
    seconds, at_once, steps, prompts = (statistics.median(values) for values in zip(*cells, strict=True))
    # Those of the start are taken in together, each later one when another request ends.
    load, prefills = Load(at_once, 200), (1 + prompts - requests) / steps
    return CostPoint(
        f"{arm}, {requests} at once", seconds,
        lambda c: round_cost(OURS, H200, c, load, plan).total_s + prefills * c.prefill_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """Tokens a second that others measured, with the accept length they gave for it."""

    who: str
    target: str
    gpu: GpuSpec
    plan: DraftPlan
    requests: int
    tokens_per_s: float
    accept_length: float
    num_gpus: int = 1

    @property
    def round_s(self) -> float:
        return self.requests * self.accept_length / self.tokens_per_s

    @property
    def gpus(self) -> str:
        return f"{self.num_gpus} x {self.gpu.name}" if self.num_gpus > 1 else self.gpu.name

    def point(self) -> CostPoint:
        arm = "plain" if self.plan.mode is Mode.AR else str(self.plan)
        name = f"{self.target}, {self.gpus}, {arm}, {self.requests} at once ({self.who})"
        load = Load(self.requests, 500, self.num_gpus)  # short prompts with their answers
        return round_point(name, self.round_s, PAIRS[self.target], self.gpu, self.plan, load)


def tree(budget: int) -> DraftPlan:
    return DraftPlan(Mode.TREE, budget)


SUBSIR, PR23000, RTX6KPRO = "SubSir's SGLang fork", "SGLang PR 23000", "voipmonitor/rtx6kpro, vLLM"
# The chain's accept length in the fork's table is given as 5.8 to 6.4; the middle is taken.
PUBLISHED_TIMES = (
    Published(SUBSIR, "Qwen3-8B", B200, PLAIN, 1, 227, 1),
    Published(SUBSIR, "Qwen3-8B", B200, PLAIN, 8, 1413, 1),
    Published(SUBSIR, "Qwen3-8B", B200, PLAIN, 32, 4901, 1),
    Published(PR23000, "Qwen3-8B", B200, CHAIN, 1, 1162, 6.35),
    Published(PR23000, "Qwen3-8B", B200, CHAIN, 32, 15327, 6.48),
    Published(SUBSIR, "Qwen3-8B", B200, CHAIN, 1, 904, 6.1),
    Published(SUBSIR, "Qwen3-8B", B200, CHAIN, 8, 4571, 6.1),
    Published(SUBSIR, "Qwen3-8B", B200, CHAIN, 32, 10579, 6.1),
    Published("recursive-dflash2", "Qwen3-8B", A100, PLAIN, 1, 651 / 7.20, 1),
    Published("trymirai/sglang", "Qwen3.6-27B", B200, PLAIN, 1, 89.9, 1),
    Published(SUBSIR, "Qwen3.6-27B", B200, CHAIN, 1, 324, 6.98),
    Published(SUBSIR, "Qwen3.6-27B", B200, CHAIN, 8, 1446, 6.98),
    Published(SUBSIR, "Qwen3.6-27B", B200, CHAIN, 32, 1619, 6.98),
)
# Not fitted, shown beside what the model says of them. Trees of the same fork, overlap scheduling off; accept
# lengths about 7.2 at 16 nodes, 7.5 to 8.1 at 64, for the hybrid 12.8 % above the chain's at 16 nodes. A
# mixture on an A800, whose memory is the A100's; its drafter was for another target, which costs the same.
# Kimi K2.6, which has the sizes of K2.5, in vLLM with NCCL tuned, its KV cache in FP8, prompts short.
PUBLISHED_CHECKS = (
    Published(SUBSIR, "Qwen3-8B", B200, tree(16), 1, 832, 7.2),
    Published(SUBSIR, "Qwen3-8B", B200, tree(16), 8, 2005, 7.2),
    Published(SUBSIR, "Qwen3-8B", B200, tree(16), 32, 6218, 7.2),
    Published(SUBSIR, "Qwen3-8B", B200, tree(64), 1, 806, 7.8),
    Published(SUBSIR, "Qwen3-8B", B200, tree(64), 8, 1333, 7.8),
    Published(SUBSIR, "Qwen3-8B", B200, tree(64), 32, 3338, 7.8),
    Published(SUBSIR, "Qwen3.6-27B", B200, tree(16), 1, 376, 6.98 * 1.128),
    Published(SUBSIR, "Qwen3.6-27B", B200, tree(16), 8, 1124, 6.98 * 1.128),
    Published(SUBSIR, "Qwen3.6-27B", B200, tree(16), 32, 1868, 6.98 * 1.128),
    Published("SGLang issue 29244", "Qwen3-Coder-30B-A3B", A100, PLAIN, 1, 146, 1),
    Published("SGLang issue 29244", "Qwen3-Coder-30B-A3B", A100, CHAIN, 1, 93, 2.0),
    Published(RTX6KPRO, "Kimi K2.5", RTX_PRO_6000, PLAIN, 1, 88.5, 1, num_gpus=8),
    Published(RTX6KPRO, "Kimi K2.5", RTX_PRO_6000, PLAIN, 8, 340.7, 1, num_gpus=8),
    Published(RTX6KPRO, "Kimi K2.5", RTX_PRO_6000, PLAIN, 32, 823.6, 1, num_gpus=8),
)


def fitted(title: str, points: Sequence[CostPoint], start: Calibration, free: Sequence[str]) -> Fitted:
    return Fitted(title, fit(points, start, free), tuple(leave_one_out(points, start, free)))


@cache
def embedded_fit() -> Fitted:
    """The embedded engine's calibration, from our measurements alone."""
    return fitted(
        "embedded engine, H200, measured here", list(embedded_points()), EMBEDDED_START, EMBEDDED_FREE
    )


@cache
def sglang_fit() -> Fitted:
    """SGLang's calibration for a small target, from our measurements alone."""
    return fitted("SGLang, H200, 135M, measured here", list(sglang_points()), START, SGLANG_FREE)


@cache
def large_fit() -> Fitted:
    """For targets of billions: host and tree as measured here, shares from what others published."""
    start = replace(
        sglang_fit().calibration, state_bandwidth_share=START.state_bandwidth_share,
        bandwidth_share=START.bandwidth_share, flop_share=START.flop_share, link_share=LINK_SHARE,
        prefill_s=0.0,
    )  # fmt: skip
    points = [row.point() for row in PUBLISHED_TIMES]
    return fitted("SGLang, larger targets, published by others", points, start, LARGE_FREE)


if __name__ == "__main__":
    for found in (embedded_fit(), sglang_fit(), large_fit()):
        print(f"{found.title}\n{found.calibration}\n{describe(found.predictions)}\n")
