"""How fast is the embedded engine: plain, chain and trees, interleaved on the same prompts?

For each prompt every arm runs in turn, after one warm-up run of each; the figure of an arm is its new
tokens over its decode time, prefill apart, summed over prompts. With --row the machine is placed
first: milliseconds of verify passes of 1, 16, 32 and 64 tokens after a prefix of 200, by stock
transformers modules and by this engine. The last line is JSON.

    ddtree must be importable (make demo installs it); then for instance
    python benchmarks/bench_engine.py --dtype bfloat16 --row --output results/engine_cpu_bf16.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from common import SETS, engine_arguments, load_engine, load_prompts, load_stock, progress, write_results
from ddtree import Engine, Mode, Request, SamplingParams
from ddtree.config import parse_budget
from ddtree.engine.protocols import TargetModel
from ddtree.layers.window import Window

PREFIX_TOKENS = 200
WIDTHS = (1, 16, 32, 64)
Arm = tuple[Mode, Any]


def arm_name(arm: Arm) -> str:
    mode, budget = arm
    return f"tree:{budget}" if mode is Mode.TREE else mode.value


def run_set(
    engine: Engine, prompts: list[str], arms: list[Arm], sampling: SamplingParams, step: Any
) -> dict[str, Any]:
    """Every arm on every prompt, interleaved; totals by arm."""
    totals: dict[str, dict[str, float]] = {arm_name(arm): defaultdict(float) for arm in arms}
    same: dict[str, int] = defaultdict(int)
    for prompt in prompts:
        tokens = engine.encode(prompt)
        reference = None
        for arm in arms:
            result = engine.generate(Request(tokens, sampling, *arm))
            reference = reference or result.tokens
            total, stats = totals[arm_name(arm)], result.stats
            total["new_tokens"] += stats.new_tokens - 1
            total["decode_s"] += stats.decode_s
            total["prefill_s"] += stats.prefill_s
            total["rounds"] += stats.verify_ct
            total["committed"] += sum(k * n for k, n in stats.accept_histogram.items())
            same[arm_name(arm)] += result.tokens == reference
            step()
    plain = totals[arm_name(arms[0])]
    plain_rate = plain["new_tokens"] / plain["decode_s"]
    return {
        name: {
            "tokens_per_s": round(total["new_tokens"] / total["decode_s"], 1),
            "ratio_to_plain": round(total["new_tokens"] / total["decode_s"] / plain_rate, 3),
            "accept_length": round(total["committed"] / total["rounds"], 3),
            "round_ms": round(total["decode_s"] / total["rounds"] * 1e3, 3),
            "prefill_ms": round(total["prefill_s"] / len(prompts) * 1e3, 2),
            "texts_as_plain": f"{same[name]} of {len(prompts)}",
        }
        for name, total in totals.items()
    }


def verify_ms(target: TargetModel, device: torch.device, repeats: int) -> dict[str, float]:
    """Median milliseconds of a verify pass by width, after a prefix of 200 tokens."""
    cache = target.new_kv_cache(PREFIX_TOKENS + max(WIDTHS))
    cache.data.zero_()
    row = {}
    for width in WIDTHS:
        positions = torch.arange(PREFIX_TOKENS, PREFIX_TOKENS + width, device=device)
        window = Window.at(
            PREFIX_TOKENS, positions, torch.ones(width, width, dtype=torch.bool, device=device).tril()
        )
        tokens, times = torch.zeros(width, dtype=torch.int64, device=device), []
        for _ in range(repeats + 2):
            begin = time.perf_counter()
            target.forward(tokens, window, cache, ())
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        row[str(width)] = round(statistics.median(times[2:]), 2)
    return row


def count_launches(engine: Engine, arm: Arm, max_tokens: int) -> dict[str, float]:
    """CUDA kernels a round, and waits of the host a round: every stream, event and device synchronisation."""
    prompt = engine.encode("Count from one to twenty.")
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.generate(Request(prompt, sampling, *arm))  # graphs are captured before the profile
    stream = engine.stream(Request(prompt, sampling, *arm))
    chunks = iter(stream)
    next(chunks)  # prefill
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for _ in chunks:
            pass
    rounds = stream.result().stats.verify_ct
    kernels = waits = 0
    for event in profile.events():
        name = event.name
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels += not name.startswith(("Memcpy", "Memset"))
        # A copy to pageable host memory waits by itself; the profiler's own last wait is not a round's.
        waits += name in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
    return {"kernels": round(kernels / rounds, 1), "host_waits": round((waits - 1) / rounds, 2)}


def machine_row(engine: Engine, model: str) -> dict[str, dict[str, float]]:
    """Verify passes of stock transformers and of this engine, launched eagerly."""
    stock = load_stock(model, engine)
    with torch.inference_mode():
        return {
            "stock transformers": verify_ms(stock, engine.device, repeats=9),
            "this engine": verify_ms(engine.target, engine.device, repeats=9),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engine_arguments(parser)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--budgets", nargs="*", default=["16"])
    parser.add_argument("--row", action="store_true")
    args = parser.parse_args()
    engine = load_engine(args)
    arms: list[Arm] = [(Mode.AR, "auto"), (Mode.CHAIN, "auto")]
    arms += [(Mode.TREE, parse_budget(budget)) for budget in args.budgets]
    sampling = SamplingParams(max_tokens=args.max_tokens)
    results: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "prompts": args.prompts,
        "threads": torch.get_num_threads(),
        "dtype": str(engine.pair.kv_cache.data.dtype),
    }
    if args.row:
        results["verify_ms"] = machine_row(engine, args.model)
    warm_up = engine.encode("Say hello.")
    for arm in arms:
        engine.generate(Request(warm_up, SamplingParams(max_tokens=32), *arm))
    with progress("runs", len(args.sets) * args.prompts * len(arms)) as step:
        results["sets"] = {
            name: run_set(engine, load_prompts(name, args.prompts), arms, sampling, step)
            for name in args.sets
        }
    if (Mode.TREE, "auto") in arms:
        results["auto_costs_ms"] = engine.policy().costs.to_record()  # as corrected by the live run
    if engine.device.type == "cuda":
        results["a_round"] = {arm_name(arm): count_launches(engine, arm, 64) for arm in arms}
        results["kernels_per_layer"] = engine.target.kernels_per_layer
        print(results["a_round"])
    for name, table in results["sets"].items():
        for arm, row in table.items():
            print(name, arm, row)
    write_results(args.output, results)


if __name__ == "__main__":
    main()
