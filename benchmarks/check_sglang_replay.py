"""Does SGLang emit exactly what the target says? Replays outputs of plain decoding, DFLASH and draft trees.

Each arm answers prompts greedily and with a mix of sampling settings, at one request at a time and many at
once. Then every finished output is teacher-forced through plain prefill of the target on transformers, in the
same number format, and every emitted token is checked (`ddtree.trace.replay`). In float32 a token may miss
the replay's own by 1e-3; in bfloat16 by twice the largest gap of plain SGLang's greedy outputs, which is
measured first and shown. Only this project's plugin keys its noise, so sampled outputs of other arms are not
replayed.
An ending that stock SGLang 0.5.17 gives with any speculation (`is_overrun`) is counted apart.
Tokens of some outputs are then exchanged: each such fault must be found. --faults spoils the last arm itself
(`sglang_faults`): its largest gap must exceed eps tenfold. Exits 1 where a token is wrong, a text ended where
it should not have, or a planted fault passed. Runs resume from --output. Needs a GPU and SGLang.

    python benchmarks/check_sglang_replay.py --arms plain ddtree:31 --output results/sglang_replay.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import SETS, load_prompts
from ddtree.trace import target
from ddtree.trace.files import KEEPS_OVERRUN
from ddtree.trace.grammar import grammar_masks
from ddtree.trace.judge import calibrated_eps, judge_outputs
from ddtree.trace.outputs import Output
from ddtree.trace.replay import Replayer
from ddtree.tree.noise import keyed_gumbel
from sglang_common import (
    Clock,
    EngineDied,
    EngineProcess,
    Results,
    chat_prompts,
    engines,
    sglang_arguments,
)
from sglang_faults import FAULT_FILE, FAULTS, PLUGIN

FAULT_TIMES_EPS = 10
FAULT_PROMPTS = 8
MIXES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "presence_penalty": 0.6},
    {"temperature": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.0, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.2,
     "repetition_penalty": 1.05, "min_new_tokens": 48},
    {"temperature": 1.0, "logit_bias": {"28": 3.0, "30": -2.0, "198": 1.0}},
    {"temperature": 0.0, "min_new_tokens": 64},
)  # fmt: skip
REGEXES = (r"[A-Z][a-z]+( [a-z]+){3,12}\.", r"(Yes|No), because [a-z ,]{10,60}\.", r"\d{1,3}( \d{1,3}){4,20}")


def sampled_parameters(index: int, *, with_regex: bool) -> dict[str, Any]:
    """Sampling parameters of the index-th sampled request, seed included."""
    if with_regex and index % 4 == 3:
        return {
            "temperature": 0.8,
            "regex": REGEXES[index // 4 % len(REGEXES)],
            "sampling_seed": 5_000 + index,
        }
    return {**MIXES[index % len(MIXES)], "sampling_seed": 1_000 + index}


def requests_of(
    kind: str, prompts: Sequence[Sequence[int]], max_tokens: int, *, with_regex: bool
) -> list[dict[str, Any]]:
    """Requests of a kind: greedy or sampled."""
    requests = []
    for index, tokens in enumerate(prompts):
        chosen = (
            {"temperature": 0.0} if kind == "greedy" else sampled_parameters(index, with_regex=with_regex)
        )
        sampling = {**chosen, "max_new_tokens": max_tokens}
        if "min_new_tokens" in sampling:
            sampling["min_new_tokens"] = min(sampling["min_new_tokens"], max_tokens)
        requests.append({"tokens": list(tokens), "sampling": sampling})
    return requests


def cell_name(arm: str, concurrency: int, kind: str) -> str:
    return f"{arm} {concurrency} {kind}"


def replays(arm: str, kind: str) -> bool:
    """Whether an arm's outputs of a kind follow from the seed."""
    return kind == "greedy" or arm.startswith("ddtree")


def collect(
    processes: dict[str, EngineProcess], cells: Sequence[tuple[str, int, str]], requests: dict[str, Any],
    results: Results, clock: Clock,
) -> None:  # fmt: skip
    """Let engines answer the cells that are not answered yet."""
    for arm, concurrency, kind in cells:
        if cell_name(arm, concurrency, kind) in results.cells or clock.left_s() < 0:
            continue
        process = processes[arm]
        if arm not in results.engines:
            results.engines[arm] = process.call("info")
        process.call("flush")
        made = process.call("run", requests=requests[kind], concurrency=concurrency)
        results.add(cell_name(arm, concurrency, kind), {"answers": made["answers"]})
        print(f"{arm}, {concurrency} at once, {kind}: {made['wall_s']:.1f} s", flush=True)


def judge_cell(
    replayer: Replayer, requests: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]], eps: float,
    context_tokens: int, *, plant: bool, overrun_tokens: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Verdicts of a cell's outputs, pooled, with the first violation of each that has one.

    `overrun_tokens` is the longest round of an engine that keeps overruns, else 0.
    """
    errors: list[dict[str, Any]] = []
    outputs: list[Output] = []
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if "error" in answer or not answer["tokens"]:
            errors.append({"output": index, "error": answer.get("error", "no tokens")})
        else:
            asked = request["tokens"], answer["tokens"], request["sampling"]
            outputs.append(Output(*asked, str(index), answer["finish"]))
    judged = judge_outputs(
        replayer, outputs, eps, context_tokens, plant=plant, overrun_tokens=overrun_tokens
    )  # fmt: skip
    report = judged.to_json()
    names = ("outputs", "tokens", "not_best", "max_gap", "gaps_above", "planted", "planted_found",
             "planted_smallest_gap")  # fmt: skip
    return {name: report[name] for name in names} | {
        "violations": [
            {"output": int(name), "sampling": requests[int(name)]["sampling"], "of_its_tokens": number}
            | asdict(violation)
            for name, violation, number in judged.first_violations()
        ],
        "endings": [found | {"output": int(found["output"])} for found in report["endings"]],
        "known_endings": [found | {"output": int(found["output"])} for found in report["known_endings"]],
        "errors": errors,
    }


def block_size(args: argparse.Namespace) -> int:
    """The drafter's block, the most tokens that a round commits; 0 without a drafter."""
    from ddtree.models import resolve_drafter

    folder = resolve_drafter(args.drafter, args.model)
    if folder is None:
        return 0
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["block_size"])


def overruns_of(engine: dict[str, Any], round_tokens: int) -> int:
    """The `overrun_tokens` of an engine, from what it says of itself."""
    speculates = engine["settings"]["speculative_algorithm"] is not None
    return round_tokens if speculates and engine["sglang"] in KEEPS_OVERRUN else 0


def is_lossless(row: dict[str, Any]) -> bool:
    """Whether a judged cell has no wrong token, ending or error, and no planted fault that passed."""
    wrong = row["violations"] or row["endings"] or row["errors"]
    return not wrong and row["planted_found"] == row["planted"]


def load_replayer(args: argparse.Namespace) -> Replayer:
    """The target on transformers, in the engines' number format, on a GPU where there is one."""
    replayer = target.load_replayer(args.model, args.dtype, noise=keyed_gumbel)
    if args.grammar_backend == "xgrammar":
        tokenizer = target.load_tokenizer(args.model)
        replayer.make_masks = grammar_masks(tokenizer, replayer.vocab_size, replayer.stop_tokens)
    return replayer


def judge_all(
    replayer: Replayer, results: Results, cells: Sequence[tuple[str, int, str]], requests: dict[str, Any],
    dtype: str, round_tokens: int,
) -> None:  # fmt: skip
    """Judge every answered cell; plain greedy outputs first, since they give eps."""

    def judge(arm: str, concurrency: int, kind: str, eps: float, *, plant: bool) -> dict[str, Any]:
        answers = results.cells[cell_name(arm, concurrency, kind)]["answers"]
        engine = results.engines[arm]
        overruns = overruns_of(engine, round_tokens)
        return judge_cell(
            replayer, requests[kind], answers, eps, engine["context_tokens"], plant=plant,
            overrun_tokens=overruns,
        )  # fmt: skip

    answered = [cell for cell in cells if cell_name(*cell) in results.cells and replays(cell[0], cell[2])]
    plain = {
        cell_name(*cell): judge(*cell, float("inf"), plant=False)["max_gap"]
        for cell in answered if cell[0] == "plain" and cell[2] == "greedy"
    }  # fmt: skip
    eps = calibrated_eps(dtype, list(plain.values()))
    results.verdict["eps"], results.verdict["plain_max_gaps"] = eps, plain
    if eps is None:
        raise SystemExit(f"{dtype} has no eps yet: let the arm plain answer greedily too")
    rows = results.verdict.setdefault("rows", {})
    for cell in answered:
        row = rows[cell_name(*cell)] = judge(*cell, eps, plant=True)
        print(cell_name(*cell), {key: value for key, value in row.items() if key != "violations"}, flush=True)
        for violation in row["violations"]:
            print("   wrong:", violation, flush=True)
        results.write()


def collect_faults(
    args: argparse.Namespace, requests: Sequence[dict[str, Any]], results: Results, clock: Clock
) -> None:
    """Let one engine of the last arm answer greedily under each fault that is not answered yet."""
    missing = [fault for fault in args.faults if f"fault {fault}" not in results.cells]
    if not missing or clock.left_s() < 0:
        return
    arm = args.arms[-1]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        os.environ[FAULT_FILE] = file.name
        with engines([arm], args, PLUGIN) as processes:
            for fault in missing:
                Path(file.name).write_text(fault, encoding="utf-8")
                processes[arm].call("flush")
                made = processes[arm].call("run", requests=requests, concurrency=len(requests))
                results.add(f"fault {fault}", {"answers": made["answers"]})
                print(f"{arm} with a fault in {fault}: {made['wall_s']:.1f} s", flush=True)


def judge_faults(
    args: argparse.Namespace, replayer: Replayer, requests: Sequence[dict[str, Any]], results: Results
) -> bool:
    """Whether each fault's largest gap is at least ten times eps."""
    found, eps = results.verdict.setdefault("faults", {}), results.verdict["eps"]
    for fault in args.faults:
        if f"fault {fault}" in results.cells:
            answers = results.cells[f"fault {fault}"]["answers"]
            row = judge_cell(replayer, requests, answers, eps, sys.maxsize, plant=False)
            found[fault] = {"max_gap": row["max_gap"], "times_eps": round(row["max_gap"] / eps, 1)}
            print(f"fault in {fault}:", found[fault], flush=True)
    return all(row["times_eps"] >= FAULT_TIMES_EPS for row in found.values())


def texts_as_plain(results: Results, cells: Sequence[tuple[str, int, str]]) -> dict[str, str]:
    """Greedy outputs that equal plain decoding's at one request; in bfloat16 near ties part many."""
    plain = results.cells.get(cell_name("plain", 1, "greedy"))
    found = {}
    for arm, concurrency, kind in cells:
        cell = results.cells.get(cell_name(arm, concurrency, kind))
        if plain and cell and kind == "greedy":
            pairs = list(zip(plain["answers"], cell["answers"], strict=True))
            same = sum(a.get("tokens") == b.get("tokens") for a, b in pairs)
            found[cell_name(arm, concurrency, kind)] = f"{same} of {len(pairs)}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sglang_arguments(parser, max_requests=32)
    parser.add_argument("--arms", nargs="+", default=["plain", "ddtree:31"])
    parser.add_argument("--kinds", nargs="+", default=["greedy", "sampled"], choices=["greedy", "sampled"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--faults", nargs="*", default=[], choices=FAULTS)
    parser.add_argument(
        "--collect-only", action="store_true", help="judge in a later run of the same command"
    )
    args = parser.parse_args()
    args.max_requests = max(args.max_requests, *args.concurrency)
    columns = [load_prompts(name, args.prompts) for name in SETS]
    texts = [text for row in zip(*columns, strict=True) for text in row][: args.prompts]
    prompts = chat_prompts(args.model, texts)
    with_regex = args.grammar_backend == "xgrammar"
    requests = {
        kind: requests_of(kind, prompts, args.max_tokens, with_regex=with_regex) for kind in args.kinds
    }
    names = ("model", "drafter", "attention_backend", "dtype", "page_size", "grammar_backend", "prompts",
             "max_tokens", "engine_arguments", "ddtree_config")  # fmt: skip
    results = Results(args.output, {name: getattr(args, name) for name in names})
    cells = [
        (arm, count, kind)
        for arm in args.arms for count in args.concurrency for kind in args.kinds if replays(arm, kind)
    ]  # fmt: skip
    missing = [
        arm for arm in args.arms if any(c[0] == arm and cell_name(*c) not in results.cells for c in cells)
    ]
    clock, died = Clock(args.max_seconds), False
    if missing:
        with engines(missing, args) as processes:
            for arm in missing:
                try:
                    collect(processes, [cell for cell in cells if cell[0] == arm], requests, results, clock)
                except EngineDied as error:
                    died = True
                    print(error, flush=True)
    spoiled = requests_of("greedy", prompts[:FAULT_PROMPTS], args.max_tokens, with_regex=False)
    collect_faults(args, spoiled, results, clock)
    all_found = True
    if not args.collect_only:
        replayer = load_replayer(args)
        judge_all(replayer, results, cells, requests, args.dtype, block_size(args))
        all_found = judge_faults(args, replayer, spoiled, results)
        results.verdict["texts_as_plain"] = texts_as_plain(results, cells)
        results.write()
    rows = results.verdict.get("rows", {})
    print({name: value for name, value in results.verdict.items() if name != "rows"})
    sys.exit(int(died or not all_found or not all(is_lossless(row) for row in rows.values())))


if __name__ == "__main__":
    main()
