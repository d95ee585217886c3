"""What does a trace cost? The same requests untraced and traced, arms interleaved.

For each repeat every prompt is decoded greedily in tree mode at one budget by each arm (no trace, summary,
full), in an order that turns from one repeat to the next. A traced run's cost is its decode time over that of
the untraced run of the same prompt and repeat; the median and the quartiles of all of them are told, on the
clock and in time of the processor, which others' load does not blur. Beside it stands what recording a round
at summary takes, timed alone. The last line is JSON.

    python benchmarks/bench_trace.py --output results/trace_overhead.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from common import SETS, engine_arguments, load_engine, load_prompts, progress, write_results
from ddtree import Engine, Generation, Mode, Request, RoundStats, SamplingParams
from ddtree.trace.record import RoundRecorder, TraceRecorder
from ddtree.trace_format import Detail, TraceRound, TraceWriter, to_line

ARMS = ("none", *Detail)
ROUNDS_ALONE = 2000


class Taken(NamedTuple):
    """What one request took: decode time on the clock, and time of the whole request on the processor."""

    wall_s: float
    cpu_s: float


def decode(engine: Engine, request: Request, recorder: TraceRecorder | None) -> tuple[Taken, Generation]:
    """One request by one arm; the writer's thread is in the processor's time."""
    begin = time.process_time()
    made = engine.generate(request) if recorder is None else recorder.generate(engine, request)
    return Taken(made.stats.decode_s, time.process_time() - begin), made


def measure(
    engine: Engine, requests: list[Request], repeats: int, recorders: dict[str, TraceRecorder | None]
) -> dict[str, list[Taken]]:
    """What every request and repeat took by arm; the first repeat warms up and is left out."""
    taken: dict[str, list[Taken]] = {arm: [] for arm in ARMS}
    with progress("repeats", repeats + 1) as step:
        for repeat in range(repeats + 1):
            for number, request in enumerate(requests):
                turn, texts = (repeat + number) % len(ARMS), set()
                for arm in ARMS[turn:] + ARMS[:turn]:
                    took, made = decode(engine, request, recorders[arm])
                    texts.add(made.tokens)
                    if repeat:
                        taken[arm].append(took)
                if len(texts) != 1:
                    raise RuntimeError("a trace changed the tokens")
            step()
    return taken


def quartiles(costs: Sequence[float]) -> dict[str, float]:
    """Quartiles of costs over the untraced runs, as fractions."""
    return dict(
        zip(("low", "median", "high"), (round(q, 4) for q in statistics.quantiles(costs, n=4)), strict=True)
    )


def round_alone_us(file: Path) -> dict[str, float]:
    """Median microseconds of recording a round at summary, and of making its line in the writer's thread."""
    stats = RoundStats(
        mode=Mode.TREE, node_budget=31, num_nodes=31, prefix_len=500, accept_tokens=(1000, 2000, 3000, 4000),
        round_ms=2.0, root_token=999, accept_indices=(0, 1, 4, 9),
    )  # fmt: skip
    writer = TraceWriter(file)
    recorder, takes = RoundRecorder("r0", writer, Detail.SUMMARY, None), []
    for _ in range(ROUNDS_ALONE):
        begin = time.perf_counter()
        recorder.on_round(stats)
        recorder.on_chunk(())
        takes.append(time.perf_counter() - begin)
    writer.close()
    line = TraceRound("r0", 1, 500, 999, "tree", 31, stats.accept_tokens, stats.accept_indices, 2.0)
    lines = []
    for _ in range(ROUNDS_ALONE):
        begin = time.perf_counter()
        to_line(line)
        lines.append(time.perf_counter() - begin)
    return {
        name: round(statistics.median(times) * 1e6, 2) for name, times in (("take", takes), ("line", lines))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engine_arguments(parser)
    parser.add_argument("--prompts", type=int, default=2, help="of each set")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    engine = load_engine(args)
    sampling = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    requests = [
        Request(engine.encode(prompt), sampling, Mode.TREE, args.budget)
        for name in SETS
        for prompt in load_prompts(name, args.prompts)
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recorders: dict[str, TraceRecorder | None] = {"none": None}
        for detail in Detail:
            recorders[detail] = stack.enter_context(TraceRecorder(Path(folder) / detail, detail))
        taken = measure(engine, requests, args.repeats, recorders)
        alone = round_alone_us(Path(folder) / "alone")
    arms: dict[str, Any] = {}
    for arm in ARMS[1:]:
        pairs = list(zip(taken[arm], taken["none"], strict=True))
        arms[arm] = {
            "wall": quartiles([traced.wall_s / plain.wall_s - 1 for traced, plain in pairs]),
            "cpu": quartiles([traced.cpu_s / plain.cpu_s - 1 for traced, plain in pairs]),
        }
    untraced_s = [took.wall_s for took in taken["none"]]
    write_results(
        args.output,
        {
            "model": args.model, "device": str(engine.device),
            "dtype": str(engine.pair.kv_cache.data.dtype).removeprefix("torch."),
            "budget": args.budget, "max_tokens": args.max_tokens, "num_prompts": len(requests),
            "repeats": args.repeats, "extra_time": arms, "summary_round_alone_us": alone,
            "untraced_tokens_per_s": round(
                (args.max_tokens - 1) * len(untraced_s) / sum(untraced_s), 1
            ),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
