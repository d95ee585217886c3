"""Does memory grow? Resident and GPU memory over thousands of rounds, and the demo's peak.

Requests of alternating modes run until the rounds are done; memory after the first tenth is compared
with memory at the end. With --demo, `ddtree demo` runs in a child and its peak is reported. Exits 1 if
memory grew by more than 2 %. The last line is JSON.

    python benchmarks/check_memory.py --rounds 10000 --demo --output results/memory_cpu.json
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from common import SETS, engine_arguments, load_engine, load_prompts, progress, write_results
from ddtree import Engine, Mode, Request, SamplingParams

LARGEST_GROWTH = 0.02
PLANS: tuple[tuple[Mode, Any], ...] = (
    (Mode.TREE, 16),
    (Mode.CHAIN, 1),
    (Mode.TREE, 31),
    (Mode.AR, 1),
    (Mode.TREE, "auto"),
)
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "top_p": 0.9}, {"frequency_penalty": 0.3})


def resident_mb() -> float:
    """Resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def memory_mb(engine: Engine) -> dict[str, float]:
    gc.collect()
    row = {"resident": round(resident_mb(), 1)}
    if engine.device.type == "cuda":
        row["cuda_allocated"] = round(torch.cuda.memory_allocated() / 1e6, 1)
        row["cuda_reserved"] = round(torch.cuda.memory_reserved() / 1e6, 1)
    return row


def run_rounds(engine: Engine, num_rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    """Run requests until that many rounds are done; memory after each tenth of them."""
    prompts = cycle(load_prompts(SETS[0], 20))
    plans, samplings = cycle(PLANS), cycle(SAMPLINGS)
    rows: list[dict[str, Any]] = []
    done = 0
    with progress("rounds", num_rounds) as step:
        while done < num_rounds:
            mode, budget = next(plans)
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **next(samplings))
            result = engine.generate(Request(engine.encode(next(prompts)), sampling, mode, budget))
            for _ in range(result.stats.verify_ct):
                step()
            done += result.stats.verify_ct
            if done >= (len(rows) + 1) * num_rounds / 10:
                rows.append({"rounds": done, **memory_mb(engine)})
    return rows


def demo_peak_mb() -> float:
    """Peak resident memory of `ddtree demo` in a child process, in megabytes."""
    subprocess.run([sys.executable, "-m", "ddtree", "demo"], check=True, stdout=subprocess.DEVNULL)
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engine_arguments(parser)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--demo", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if args.demo:
        results["demo_peak_mb"] = demo_peak_mb()
    engine = load_engine(args)
    rows = run_rounds(engine, args.rounds, args.max_tokens)
    growth = {key: round(rows[-1][key] / rows[0][key] - 1, 4) for key in rows[0] if key != "rounds"}
    results |= {"memory_mb": rows, "growth_after_first_tenth": growth}
    write_results(args.output, results)
    sys.exit(0 if max(growth.values()) <= LARGEST_GROWTH else 1)


if __name__ == "__main__":
    main()
