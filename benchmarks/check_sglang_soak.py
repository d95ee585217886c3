"""Does a server with draft trees stand a long mixed load, without a lost KV slot or a wrong token?

Waves of requests at a fixed concurrency, all drawn from one seed: prompts and output lengths of all sizes,
greedy and every sampling setting, streamed or not, some cut off after a random time, and in each wave two
greedy requests side by side that run into the context limit. After each wave the prefix cache is emptied and
the pool must be whole again; SGLang's own check of its pools, which ends the server on a leak, runs then too.
Afterwards every finished request is replayed (`ddtree.trace.replay`). The allowed gap of a 16-bit format
comes from a file of `check_sglang_replay.py`, or better from a run of this program with `--arm plain`, whose
greedy outputs are as many: twice their largest gap. Outputs are kept in --output after each wave, so that a
killed run goes on where it was. Exits 1 on a death, a leak, a failed request or a wrong token. Needs a GPU
and SGLang.

    python benchmarks/check_sglang_soak.py --minutes 8 --arm plain --output results/sglang_soak_plain.json
    python benchmarks/check_sglang_soak.py --minutes 8 --eps-from results/sglang_soak_plain.json \\
        --output results/sglang_soak.json
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from check_sglang_replay import (
    block_size,
    is_lossless,
    judge_cell,
    load_replayer,
    overruns_of,
    replays,
    sampled_parameters,
)
from common import SETS, load_prompts
from ddtree.trace.judge import FLOAT32_EPS, calibrated_eps
from ddtree.trace.replay import Replayer
from sglang_common import EngineDied, EngineProcess, Results, chat_prompts, engines, sglang_arguments

MAX_TOKENS = (1, 2, 7, 24, 64, 128, 256)
# Room that a request has when it starts towards the context limit.
LIMIT_ROOM_TOKENS = 160
POOL_WAIT_S = 10


def wave_requests(
    args: argparse.Namespace, number: int, prompts: Sequence[Sequence[int]], context_tokens: int
) -> list[dict[str, Any]]:
    """The requests of a wave, the same for equal arguments."""
    draw = random.Random(args.seed * 1_000_003 + number)
    with_regex = args.grammar_backend == "xgrammar"
    requests = []
    for _ in range(args.wave_requests):
        prompt = list(draw.choice(prompts))
        if draw.random() < 0.3:  # long ones, of several prompts, and with a prefix that others share
            prompt = list(prompts[draw.randrange(4)]) * draw.randint(1, 4) + prompt
        if draw.random() < 0.1:
            prompt = prompt[: draw.randint(1, 8)]
        prompt = prompt[: context_tokens // 2]
        chosen = (
            {"temperature": 0.0}
            if draw.random() < 0.3
            else sampled_parameters(draw.randrange(10_000), with_regex=with_regex)
        )
        sampling = {**chosen, "max_new_tokens": draw.choice(MAX_TOKENS), "ignore_eos": draw.random() < 0.5}
        if "regex" in sampling:
            sampling["ignore_eos"] = False  # a finished expression allows nothing but the end
        # min_new_tokens above the length would be refused.
        if sampling.get("min_new_tokens", 0) > sampling["max_new_tokens"]:
            sampling["min_new_tokens"] = sampling["max_new_tokens"]
        request = {"tokens": prompt, "sampling": sampling, "stream": draw.random() < 0.5}
        if draw.random() < 0.15:
            request["abort_after_s"] = round(draw.uniform(0.0, 0.8), 3)
        requests.append(request)
    place = draw.randrange(args.wave_requests // 2)
    for begin in (0, 1):  # neighbours in the queue, so that they run together
        prompt = [token for row in prompts[begin:] for token in row][: context_tokens - LIMIT_ROOM_TOKENS]
        sampling = {"temperature": 0.0, "max_new_tokens": None, "ignore_eos": True}
        requests.insert(place, {"tokens": prompt, "sampling": sampling, "stream": bool(begin)})
    return requests


def is_finished(answer: dict[str, Any]) -> bool:
    """Whether an answer ended by itself, so that it can be replayed."""
    return "error" not in answer and (answer.get("finish") or {}).get("type") in ("stop", "length")


def was_cut_off(request: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether a request that was to be cut off was."""
    ended = (answer.get("finish") or {}).get("type")
    return "abort_after_s" in request and (ended == "abort" or "abort" in answer.get("error", "").lower())


def pool_problem(process: EngineProcess) -> str | None:
    """Why the idle engine's KV pool is not whole; None where it is."""
    begin = time.monotonic()
    while True:
        flushed = process.call("flush")["success"]
        pool = process.call("pool")
        if flushed and pool["used_tokens"] == 0 and pool["requests"] == 0:
            return None
        if time.monotonic() - begin > POOL_WAIT_S:
            return f"{pool} after {POOL_WAIT_S} s without a request; emptied: {flushed}"
        time.sleep(0.5)


def run_wave(process: EngineProcess, requests: Sequence[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Answers of a wave, what became of its requests, and the state of the pool after it."""
    made = process.call("run", requests=requests, concurrency=concurrency)
    answers = made["answers"]
    pairs = list(zip(requests, answers, strict=True))
    failed = [
        {"request": index, "answer": {key: answer.get(key) for key in ("error", "finish")}}
        for index, (request, answer) in enumerate(pairs)
        if not is_finished(answer) and not was_cut_off(request, answer)
    ]
    return {
        "wall_s": round(made["wall_s"], 2),
        "requests": len(requests),
        "finished": sum(is_finished(answer) for answer in answers),
        "cut_off": sum(was_cut_off(request, answer) for request, answer in pairs),
        "failed": failed,
        "tokens": sum(len(answer.get("tokens", ())) for answer in answers),
        "pool_problem": pool_problem(process),
        "answers": [
            {"tokens": answer["tokens"], "finish": answer["finish"]} if is_finished(answer) else None
            for answer in answers
        ],
    }


def soak(args: argparse.Namespace, prompts: Sequence[Sequence[int]], results: Results) -> None:
    """Run waves until the minutes are over; what ends the engine is kept in the results."""
    with engines([args.arm], args) as processes:
        process = processes[args.arm]
        try:
            results.engines[args.arm] = process.call("info")
            context = results.engines[args.arm]["context_tokens"]
            begin, number = time.monotonic(), len(results.cells)
            while time.monotonic() - begin < args.minutes * 60:
                requests = wave_requests(args, number, prompts, context)
                wave = run_wave(process, requests, args.concurrency)
                results.add(f"wave {number}", wave)
                print(number, {key: value for key, value in wave.items() if key != "answers"}, flush=True)
                number += 1
        except EngineDied as error:
            results.verdict["died"] = str(error)[-4000:]
            print(error, flush=True)
            results.write()


def replayable(
    arm: str, requests: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any] | None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Requests and answers of a wave that finished and follow from the target.

    Of plain decoding greedy ones without penalties: it counts a token late while its scheduler overlaps.
    """
    late = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")

    def kind(sampling: dict[str, Any]) -> str:
        return (
            "sampled" if sampling["temperature"] > 0 or any(name in sampling for name in late) else "greedy"
        )

    asked, finished = [], []
    for request, answer in zip(requests, answers, strict=True):
        if answer is not None and replays(arm, kind(request["sampling"])):
            asked.append(request)
            finished.append(answer)
    return asked, finished


class Judge:
    """Judges waves, each process with a replayer of its own."""

    replayer: Replayer

    @classmethod
    def load(cls, args: argparse.Namespace) -> None:
        cls.replayer = load_replayer(args)

    @classmethod
    def row(
        cls, requests: list[dict[str, Any]], answers: list[dict[str, Any]], eps: float, context_tokens: int,
        overruns: int,
    ) -> dict[str, Any]:  # fmt: skip
        """The verdict on a wave."""
        return judge_cell(
            cls.replayer, requests, answers, eps, context_tokens, plant=eps < math.inf,
            overrun_tokens=overruns,
        )  # fmt: skip


def judge(args: argparse.Namespace, prompts: Sequence[Sequence[int]], results: Results, eps: float) -> None:
    """Replay the waves that are not judged yet."""
    engine = results.engines[args.arm]
    context, overruns = engine["context_tokens"], overruns_of(engine, block_size(args))
    rows = results.verdict.setdefault("rows", {})
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.replay_processes, spawn, Judge.load, (args,)) as pool:
        judged = {}
        for name, wave in results.cells.items():
            if name not in rows:
                requests = wave_requests(args, int(name.split()[1]), prompts, context)
                asked, answers = replayable(args.arm, requests, wave["answers"])
                judged[pool.submit(Judge.row, asked, answers, eps, context, overruns)] = name
        for future in as_completed(judged):
            rows[judged[future]] = future.result()
            print(judged[future], future.result(), flush=True)
            results.write()


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the rows of all waves say together."""
    sums = ("outputs", "tokens", "not_best", "planted", "planted_found")
    lists = ("violations", "endings", "known_endings", "errors")
    return {
        **{key: sum(row[key] for row in rows) for key in sums},
        **{key: sum(len(row[key]) for row in rows) for key in lists},
        "max_gap": max(row["max_gap"] for row in rows),
        "gaps_above": {step: sum(row["gaps_above"][step] for row in rows) for step in rows[0]["gaps_above"]},
    }


def allowed_gap(dtype: str, replayed: Path | None) -> float:
    """eps of the replay: of float32, or as calibrated by a run of check_sglang_replay.py.

    Raises:
        SystemExit: a 16-bit format without such a run.
    """
    if dtype == "float32":
        return FLOAT32_EPS
    if replayed is None:
        raise SystemExit(f"{dtype} needs --eps-from, a file of check_sglang_replay.py in the same format")
    before = json.loads(replayed.read_text(encoding="utf-8"))
    if before["settings"]["dtype"] != dtype:
        raise SystemExit(f"{replayed} is of {before['settings']['dtype']}, not {dtype}")
    return float(before["verdict"]["eps"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sglang_arguments(parser, max_requests=32)
    parser.add_argument("--arm", default="ddtree:31")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--wave-requests", type=int, default=160, help="requests between two checks of the pool"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eps-from", type=Path)
    parser.add_argument("--replay-processes", type=int, default=4, help="how many replay at the same time")
    parser.add_argument("--no-replay", action="store_true", help="replay in a later run with --minutes 0")
    parser.set_defaults(context_tokens=2048)
    args = parser.parse_args()
    columns = [load_prompts(name, 32) for name in SETS]
    prompts = chat_prompts(args.model, [text for row in zip(*columns, strict=True) for text in row])
    names = ("arm", "model", "drafter", "attention_backend", "dtype", "page_size", "grammar_backend", "seed",
             "concurrency", "wave_requests", "context_tokens", "pool_tokens", "engine_arguments",
             "ddtree_config")  # fmt: skip
    results = Results(args.output, {name: getattr(args, name) for name in names})
    if args.minutes > 0:
        soak(args, prompts, results)
    waves = list(results.cells.values())
    results.verdict["totals"] = {
        "waves": len(waves), "minutes": round(sum(wave["wall_s"] for wave in waves) / 60, 2),
        **{key: sum(wave[key] for wave in waves) for key in ("requests", "finished", "cut_off", "tokens")},
        "failed": sum(len(wave["failed"]) for wave in waves),
        "pool_problems": [wave["pool_problem"] for wave in waves if wave["pool_problem"]],
    }  # fmt: skip
    if not args.no_replay and waves:
        is_plain = args.arm == "plain"
        eps = math.inf if is_plain else allowed_gap(args.dtype, args.eps_from)
        judge(args, prompts, results, eps)
        replayed = results.verdict["replayed"] = summary(list(results.verdict["rows"].values()))
        results.verdict["eps"] = calibrated_eps(args.dtype, [replayed["max_gap"]]) if is_plain else eps
    results.write()
    totals, rows = results.verdict["totals"], results.verdict.get("rows", {})
    print({key: value for key, value in results.verdict.items() if key != "rows"})
    broken = "died" in results.verdict or totals["failed"] or totals["pool_problems"] or not waves
    sys.exit(int(bool(broken) or not all(is_lossless(row) for row in rows.values())))


if __name__ == "__main__":
    main()
