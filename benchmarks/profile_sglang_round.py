"""Where does the time of a decoding round go, for DFLASH and for draft trees?

Each arm decodes greedily at each concurrency twice: untraced, for the time of a round, and under SGLang's own
torch profiler, for the device time of each step. Steps are the ranges of `sglang_ranges` around the launches;
kernels inside the drafter's graph are told apart by name and order. A trace slows the host, so the time that
the device idles is taken from the untraced round: its time less the device's busy time. Also counted: calls a
round in which the host waits for the device. Runs resume from --output. Needs a GPU and SGLang.

    python benchmarks/profile_sglang_round.py --output results/sglang_round_profile.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import SETS, load_prompts
from sglang_common import (
    Clock,
    EngineDied,
    EngineProcess,
    Results,
    chat_prompts,
    engines,
    sglang_arguments,
)
from sglang_ranges import PREFIX

ARMS = ("dflash", "ddtree:15", "ddtree:31", "ddtree:63")
PROFILED_ROUNDS = 24
# Enough for all profiled rounds, wherever in a text the profiler comes up.
PROFILED_TOKENS = 1024
TARGET_PASS = "target pass"
DRAFT_PASS = "draft pass"
DEVICE_EVENTS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCH_EVENTS = frozenset({"cuda_runtime", "cuda_driver"})
# Kernels of this project, whatever range they are launched in.
KERNELS = {
    "chunk_kernel": "draft top-K", "select_kernel": "draft top-K", "build_tree_kernel": "tree",
    "verify_mask_kernel": "mask", "walk_kernel": "walk", "kv_move_kernel": "KV move",
}  # fmt: skip
# What tensor-parallel ranks exchange, by a part of a kernel's name in lower case: NCCL's and SGLang's own.
EXCHANGES = {
    "allreduce": "all-reduce", "all_reduce": "all-reduce", "cross_device_reduce": "all-reduce",
    "allgather": "all-gather", "all_gather": "all-gather", "broadcast_": "broadcast",
    "reducescatter": "reduce-scatter",
}  # fmt: skip
ORDER = (
    "before the draft pass", DRAFT_PASS, "draft head", "draft top-K", "tree", "mask",
    "before the target pass", TARGET_PASS, "choice", "walk", "commit", "KV move", "draft KV write",
    "counts and logprobs", "rest of the round", "scheduler",
)  # fmt: skip


class Range(NamedTuple):
    """A named range on a host thread, in microseconds."""

    begin: float
    end: float
    name: str


class Launch(NamedTuple):
    """What one host call put on the device."""

    step: str
    events: list[dict[str, Any]]  # by their start


def innermost(ranges: Sequence[Range], begins: Sequence[float], time_us: float) -> str:
    """The range around a time that began last; "scheduler" outside of all. `ranges` by begin, as `begins`."""
    before = reversed(ranges[: bisect_right(begins, time_us)])
    return next((found.name for found in before if time_us <= found.end), "scheduler")


def launches_of(events: Sequence[dict[str, Any]]) -> list[Launch]:
    """Device events by the host call that launched them, each with the range around that call."""
    ranges: dict[Any, list[Range]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX):
            found = Range(event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(PREFIX))
            ranges[event["tid"]].append(found)
    for found in ranges.values():
        found.sort()
    begins = {thread: [one.begin for one in found] for thread, found in ranges.items()}
    calls = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCH_EVENTS and "correlation" in event.get("args", {})
    }
    grouped: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE_EVENTS:
            grouped[event["args"].get("correlation")].append(event)
    launches = []
    for correlation, found_events in grouped.items():
        call, step = calls.get(correlation), "scheduler"
        if call is not None and call["tid"] in ranges:
            step = innermost(ranges[call["tid"]], begins[call["tid"]], call["ts"])
        launches.append(Launch(step, sorted(found_events, key=lambda event: event["ts"])))
    return launches


def kernel_step(name: str) -> str | None:
    return next((step for kernel, step in KERNELS.items() if kernel in name), None)


def exchange_of(name: str) -> str | None:
    """What ranks exchange in a kernel; None for one that is a rank's own."""
    return next((kind for part, kind in EXCHANGES.items() if part in name.lower()), None)


def exchanges_us(launches: Sequence[Launch]) -> dict[str, float]:
    """Microseconds of what ranks exchange, by step and kind; a rank that waits for another one counts too."""
    times: dict[str, float] = defaultdict(float)
    for launch in launches:
        for event, (step, duration) in zip(launch.events, steps_of(launch), strict=True):
            kind = exchange_of(event["name"])
            if kind is not None:
                times[f"{step}: {kind}"] += duration
    return times


def steps_of(launch: Launch) -> list[tuple[str, float]]:
    """The step and the microseconds of each device event of a launch."""
    named = [kernel_step(event["name"]) for event in launch.events]
    steps = [name or launch.step for name in named]
    if launch.step == DRAFT_PASS and "draft top-K" in named:
        # The drafter's graph ends in: output head, top-K, tree, mask.
        first = named.index("draft top-K")
        if first > 0:
            steps[first - 1] = "draft head"
        steps[first:] = carried_on(named[first:], "draft top-K")
    elif launch.step == TARGET_PASS and "walk" in named:
        # The target's graph ends in: argmax, walk, KV move, and the drafter's KV of the path.
        walk = named.index("walk")
        first = next((i for i, event in enumerate(launch.events) if "ArgMax" in event["name"]), walk)
        tail = carried_on(named[first:], "choice")
        moved = tail.index("KV move") if "KV move" in tail else len(tail)
        steps[first:] = [
            *tail[:moved],
            *("KV move" if n else "draft KV write" for n in named[first + moved :]),
        ]
    return list(zip(steps, (event["dur"] for event in launch.events), strict=True))


def carried_on(named: Sequence[str | None], step: str) -> list[str]:
    """Steps of events of which some have a name: the others belong to the last name before them."""
    steps = []
    for name in named:
        step = name or step
        steps.append(step)
    return steps


def busy_us(events: Sequence[dict[str, Any]]) -> float:
    """Time in which the device does anything: events of several streams may overlap."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        begin = max(event["ts"], end)
        end = max(end, event["ts"] + event["dur"])
        total += max(end - begin, 0.0)
    return total


def read_round(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Device microseconds and events of each step, and the host's waits, a round.

    Raises:
        RuntimeError: there is no target pass in the trace.
    """
    device = [event for event in events if event.get("cat") in DEVICE_EVENTS]
    rounds = sum(event.get("name") == PREFIX + TARGET_PASS for event in events
                 if event.get("cat") == "user_annotation")  # fmt: skip
    if not rounds or not device:
        raise RuntimeError(
            "the trace holds no target pass on a device: did the requests end before it began?"
        )
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    launches = launches_of(events)
    for launch in launches:
        for step, duration in steps_of(launch):
            times[step] += duration
            counts[step] += 1
    waits: dict[str, int] = defaultdict(int)
    for event in events:
        if event.get("cat") in LAUNCH_EVENTS and "Synchronize" in event["name"]:
            waits[event["name"]] += 1
    ordered = sorted(times, key=lambda step: ORDER.index(step) if step in ORDER else len(ORDER))
    return {
        "rounds": rounds,
        "busy_us": round(busy_us(device) / rounds, 1),
        "steps_us": {step: round(times[step] / rounds, 1) for step in ordered},
        "device_events": {step: round(counts[step] / rounds, 1) for step in ordered},
        "exchanges_us": {name: round(time / rounds, 1) for name, time in exchanges_us(launches).items()},
        "host_waits": {name: round(count / rounds, 2) for name, count in sorted(waits.items())},
    }


def load_trace(folder: Path) -> list[dict[str, Any]]:
    """Events of the one trace that SGLang wrote into a folder, of several ranks those of the first.

    Raises:
        RuntimeError: it wrote none, or several.
    """
    files = list(folder.glob("*-TP-0*.trace.json.gz"))
    if len(files) != 1:
        raise RuntimeError(f"{len(files)} traces, not one: the requests ended before the rounds were over")
    with gzip.open(files[0], "rt", encoding="utf-8") as text:
        events: list[dict[str, Any]] = json.load(text)["traceEvents"]
    return events


def untraced_round_us(answers: Sequence[dict[str, Any]]) -> float:
    """Mean time of a round: from the first token of a streamed answer to its last, over its rounds."""
    times = [answer["end_s"] - answer["first_s"] for answer in answers if answer["rounds"]]
    return sum(times) / sum(answer["rounds"] for answer in answers) * 1e6


def measure(
    process: EngineProcess, prompts: Sequence[Sequence[int]], concurrency: int, max_tokens: int
) -> dict[str, Any]:
    """A cell: the time of a round, and where it goes."""
    sampling = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
    requests = [{"tokens": list(row), "sampling": sampling, "stream": True} for row in prompts[:concurrency]]
    process.call("run", requests=requests, concurrency=concurrency)
    process.call("flush")
    made = process.call("run", requests=requests, concurrency=concurrency)
    process.call("flush")
    with tempfile.TemporaryDirectory() as folder:
        profile = {"folder": folder, "num_steps": PROFILED_ROUNDS}
        longer = [{**row, "sampling": sampling | {"max_new_tokens": PROFILED_TOKENS}} for row in requests]
        process.call("run", requests=longer, concurrency=concurrency, profile=profile)
        cell = read_round(load_trace(Path(folder)))
    cell["round_us"] = round(untraced_round_us(made["answers"]), 1)
    cell["idle_us"] = round(cell["round_us"] - cell["busy_us"], 1)
    return cell


def table(cells: dict[str, Any]) -> str:
    """The cells as a text table, microseconds a round."""
    steps = [step for step in ORDER if any(step in cell["steps_us"] for cell in cells.values())]
    lines = [f"{'us a round':<24}" + "".join(f"{name:>16}" for name in cells)]
    for step in steps:
        lines.append(f"{step:<24}" + "".join(f"{c['steps_us'].get(step, 0):>16}" for c in cells.values()))
    for key in ("busy_us", "idle_us", "round_us"):
        lines.append(f"{key.removesuffix('_us'):<24}" + "".join(f"{c[key]:>16}" for c in cells.values()))
    waits = [sum(cell["host_waits"].values()) for cell in cells.values()]
    lines.append(f"{'host waits':<24}" + "".join(f"{count:>16.2f}" for count in waits))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sglang_arguments(parser, max_requests=32)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.set_defaults(memory_share=0.5)  # as in bench_sglang, whose engines start together too
    args = parser.parse_args()
    args.max_requests = max(args.max_requests, *args.concurrency)
    columns = [load_prompts(name, max(args.concurrency)) for name in SETS]
    prompts = chat_prompts(args.model, [text for row in zip(*columns, strict=True) for text in row])
    names = ("model", "drafter", "attention_backend", "dtype", "page_size", "max_requests", "max_tokens",
             "engine_arguments", "ddtree_config")  # fmt: skip
    results = Results(args.output, {name: getattr(args, name) for name in names})
    results.verdict["label"] = "" if args.attention_backend == "fa3" else "without FA3"
    cells = [(arm, count) for count in args.concurrency for arm in args.arms]
    missing = [cell for cell in cells if f"{cell[0]} {cell[1]}" not in results.cells]
    clock, dead = Clock(args.max_seconds), set()
    arms = [arm for arm in args.arms if any(cell[0] == arm for cell in missing)]
    with engines(arms, args, {"ddtree-ranges": "sglang_ranges:register"}) as processes:
        for arm, count in missing:
            if arm in dead or clock.left_s() < 0:
                continue
            try:
                results.engines.setdefault(arm, processes[arm].call("info"))
                results.add(f"{arm} {count}", measure(processes[arm], prompts, count, args.max_tokens))
                print(arm, count, json.dumps(results.cells[f"{arm} {count}"]), flush=True)
            except EngineDied as error:
                dead.add(arm)
                print(error, flush=True)
    for count in args.concurrency:
        chosen = {arm: results.cells.get(f"{arm} {count}") for arm in args.arms}
        made = {arm: cell for arm, cell in chosen.items() if cell}
        if made:
            print(f"\n{count} at once\n{table(made)}")
    results.write()
    sys.exit(int(bool(dead)))


if __name__ == "__main__":
    main()
