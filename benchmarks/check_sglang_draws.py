"""Are tokens that SGLang draws with draft trees distributed as the target says? G-tests of its draws.

A tiny target whose logits are one known vector is served, with a drafter whose guesses are sometimes right
(`sglang_draws_pair`), and requests with seeds of their own draw 200,000 tokens a case: temperature, top-k,
top-p, both, min-p, each penalty, min_new_tokens, logit bias, all at once, and all kinds in one batch. Every
token is held against its exact distribution after the request's own tokens (`sglang_draws`): all together, in
pairs of neighbours, as repeats, by place in its round and in its text, and by counts where all tokens have
one distribution. A plugin beside ours (`sglang_draws_probe`) makes sure that the logits were the known ones
and that walks of all depths were committed, and plants faults, each of which must be found with a tenth of
the draws. Plain decoding, without overlap since penalties are late with it, must pass the same tests of the
same cases, as a check of the tests. Exits 1 where a test fails or a fault passes. Runs resume from --output.
Needs SGLang, and a GPU unless

    python benchmarks/check_sglang_draws.py --device cpu --output results/sglang_draws.json

which serves with the CPU doubles of tests/sglang_kit.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_common import ROOT, Clock, EngineProcess, Results, engines, sglang_arguments
from sglang_draws import CASES, SIGNIFICANCE, Case, tally
from sglang_draws_pair import BLOCK_SIZE, EOS_TOKEN, VOCAB, target_logits, write_pair
from sglang_draws_probe import FAULT_FILE, FAULTS, FOLDER, LOGITS_FILE, PLUGIN, PROBE_FILE

MAX_LOGIT_ERROR = 1e-4
MIN_ACCEPT_LENGTH = 1.3
MIN_WALKS = 20  # of each depth, over all cases
FAULT_P = 1e-9  # a planted fault must be found this clearly
LENGTHS = (0.8, 1.0, 1.2)  # of a case's tokens: requests end and begin at different rounds
PROMPT_TOKENS = (4, 9)


def has_defined_order(sampling: Mapping[str, Any]) -> bool:
    """Whether plain decoding without overlap penalises in an order that does not change from start to start.

    SGLang 0.5.17 to 0.5.23 keep the kinds of penalties in a set of classes and apply them in its order.
    """
    others = {"frequency_penalty", "presence_penalty"} & set(sampling)
    return "repetition_penalty" not in sampling or not others


def plain_case(case: Case) -> Case:
    """The case as plain decoding defines it: no repetition penalty where another penalty is beside it."""
    return dataclasses.replace(case, sampling=tuple(
        sampling if has_defined_order(sampling)
        else {name: value for name, value in sampling.items() if name != "repetition_penalty"}
        for sampling in case.sampling
    ))  # fmt: skip


def requests_of(case: Case, draws: int, number: int) -> list[dict[str, Any]]:
    """Requests of a case that draw at least `draws` tokens; seeds differ from those of any other `number`."""
    generator = np.random.default_rng([11, number])
    requests: list[dict[str, Any]] = []
    missing = draws
    while missing > 0:
        index = len(requests)
        max_tokens = round(case.tokens * LENGTHS[index // len(case.sampling) % len(LENGTHS)])
        prompt = generator.integers(4, VOCAB, generator.integers(*PROMPT_TOKENS))
        sampling = {
            **case.sampling[index % len(case.sampling)], "max_new_tokens": max_tokens, "ignore_eos": True,
            "sampling_seed": 1_000_000 * number + index,
        }  # fmt: skip
        requests.append({"tokens": prompt.tolist(), "sampling": sampling})
        missing -= max_tokens
    return requests


class Cell(NamedTuple):
    """Draws of one case on one arm, with or without a planted fault."""

    arm: str
    case: str
    fault: str
    draws: int
    number: int  # of its seeds

    @property
    def name(self) -> str:
        return f"{self.arm} {self.case}, {self.fault}" if self.fault else f"{self.arm} {self.case}"


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """Every cell of a run: all cases on both arms, and each fault on its case."""
    cases, faults = list(CASES), list(FAULTS)
    return [
        *(Cell(args.arm, case, "", args.draws, 1 + cases.index(case)) for case in args.cases),
        *(Cell(args.arm, FAULTS[fault], fault, args.fault_draws, 101 + faults.index(fault))
          for fault in args.faults),
        *(Cell("plain", case, "", args.plain_draws, 201 + cases.index(case))
          for case in args.cases if args.plain_draws),
    ]  # fmt: skip


def draw(process: EngineProcess, cell: Cell, concurrency: int, folder: Path) -> dict[str, Any]:
    """Let an engine draw a cell's tokens, and judge them."""
    (folder / FAULT_FILE).write_text(cell.fault, encoding="utf-8")
    process.call("flush")
    (folder / PROBE_FILE).unlink(missing_ok=True)
    is_plain = cell.arm == "plain"
    case = plain_case(CASES[cell.case]) if is_plain else CASES[cell.case]
    requests = requests_of(case, cell.draws, cell.number)
    made = process.call("run", requests=requests, concurrency=concurrency)
    process.call("flush")
    probe = json.loads((folder / PROBE_FILE).read_text(encoding="utf-8"))
    counted = tally(
        target_logits(), EOS_TOKEN, requests, made["answers"], None if is_plain else probe["rounds"]
    )
    row = {
        "requests": len(requests), "draws": counted.num_draws, "left_to_rounding": counted.num_near,
        "impossible": counted.num_impossible, "p_values": counted.p_values(),
        "smallest_p": counted.smallest_p(), "rows_of_logits": probe["rows"],
        "max_logit_error": probe["max_logit_error"], "wall_s": round(made["wall_s"], 1),
    }  # fmt: skip
    return row if is_plain else row | walks(probe["rounds"])


def walks(rounds: dict[str, list[int]]) -> dict[str, Any]:
    """Mean accept length, the bonus token counted, and how many rounds had each number of correct drafts."""
    lens = np.array([length for lens in rounds.values() for length in lens])
    depths = np.bincount(lens - 1, minlength=BLOCK_SIZE)
    return {"accept_length": round(float(lens.mean()), 4), "rounds_by_correct_drafts": depths.tolist()}


def problems(row: dict[str, Any], limit: float) -> list[str]:
    """What is wrong with a cell without a fault, or proves nothing."""
    found = []
    if row["smallest_p"] <= limit:
        found.append(f"smallest p {row['smallest_p']:.1e}, {row['impossible']} impossible draws")
    if row["max_logit_error"] > MAX_LOGIT_ERROR:
        found.append(
            f"a logit of the target is off by {row['max_logit_error']:.1e}: it is not the planted one"
        )
    if "accept_length" in row and row["accept_length"] < MIN_ACCEPT_LENGTH:
        found.append(f"accept length {row['accept_length']}: hardly a draft was right")
    return found


def all_walks(rows: Sequence[dict[str, Any]]) -> list[int]:
    """How many rounds of all cells had each number of correct drafts."""
    return np.sum([row.get("rounds_by_correct_drafts", [0] * BLOCK_SIZE) for row in rows], axis=0).tolist()


def judge(results: Results, cells: Sequence[Cell]) -> bool:
    """Whether every case passes and every fault is found; the results get the verdict."""
    rows = {cell.name: results.cells[cell.name] for cell in cells if not cell.fault}
    tests = sum(len(row["p_values"]) for row in rows.values())
    limit = SIGNIFICANCE / tests
    wrong = {name: found for name, row in rows.items() if (found := problems(row, limit))}
    depths = all_walks(list(rows.values()))
    if min(depths) < MIN_WALKS:
        wrong["walks"] = [f"too few of some depth: {depths}"]
    faults = {cell.name: results.cells[cell.name]["smallest_p"] for cell in cells if cell.fault}
    missed = [name for name, p in faults.items() if p > FAULT_P]
    results.verdict = {
        "passed": not wrong and not missed, "tests": tests, "limit": limit,
        "smallest_p": min(row["smallest_p"] for row in rows.values()),
        "draws": {arm: sum(row["draws"] for name, row in rows.items() if name.startswith(f"{arm} "))
                  for arm in dict.fromkeys(cell.arm for cell in cells)},
        "rounds_by_correct_drafts": depths, "problems": wrong, "faults_smallest_p": faults,
        "faults_missed": missed,
    }  # fmt: skip
    results.write()
    print(json.dumps(results.verdict))
    return not wrong and not missed


def use_cpu(args: argparse.Namespace) -> None:
    """Serve on the CPU with the doubles of tests/sglang_kit, in this process's children."""
    sys.path.insert(0, str(ROOT / "tests"))
    from sglang_kit.files import FOLDER_VARIABLE
    from sglang_kit.plugin import BACKEND_NAME
    from sglang_kit.runs import environment

    unwanted = (FOLDER_VARIABLE, "DDTREE_CONFIG")  # the former would plant the tests' own drafts
    os.environ.update((k, v) for k, v in environment(ROOT, {}, {}).items() if k not in unwanted)
    args.attention_backend = BACKEND_NAME
    args.engine_arguments = {"device": "cpu", "disable_cuda_graph": True} | args.engine_arguments


def arm_arguments(arm: str, args: argparse.Namespace) -> argparse.Namespace:
    """Arguments of an arm's engine: plain decoding counts penalties a token late under overlap."""
    args = copy.copy(args)
    own = {"disable_overlap_schedule": True} if arm == "plain" else {}
    args.engine_arguments = {"random_seed": 1} | own | args.engine_arguments
    return args


def collect(args: argparse.Namespace, cells: Sequence[Cell], results: Results, folder: Path) -> None:
    """Draw every cell that the results lack, arm by arm."""
    pair = write_pair(folder / "pair")
    args.model, args.drafter = str(pair.target), str(pair.drafter)
    (folder / LOGITS_FILE).write_text(json.dumps(target_logits().tolist()), encoding="utf-8")
    (folder / FAULT_FILE).write_text("", encoding="utf-8")
    os.environ[FOLDER] = str(folder)
    clock = Clock(args.max_seconds)
    for arm in dict.fromkeys(cell.arm for cell in cells):
        missing = [cell for cell in cells if cell.arm == arm and cell.name not in results.cells]
        if not missing or clock.left_s() < 0:
            continue
        with engines([arm], arm_arguments(arm, args), PLUGIN) as processes:
            results.engines[arm] = processes[arm].call("info")
            for cell in missing:
                if clock.left_s() > 0:
                    results.add(cell.name, row := draw(processes[arm], cell, args.max_requests, folder))
                    print(cell.name, json.dumps(row), flush=True)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sglang_arguments(parser, max_requests=64)
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--arm", default="ddtree:31", help="the arm that is tested, beside plain")
    add("--draws", type=int, default=200_000, help="of each case")
    add("--fault-draws", type=int, default=20_000, help="of each fault")
    add("--plain-draws", type=int, default=20_000, help="of each case by plain decoding; 0 leaves it out")
    add("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    add("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.set_defaults(dtype="float32")
    args = parser.parse_args(words)
    if not args.arm.startswith("ddtree"):
        parser.error(f"--arm {args.arm} is not allowed: ddtree:B or ddtree-chain:B, such as ddtree:31")
    if args.keep_engines_s:
        parser.error("--keep-engines-s is not allowed: the planted models are gone after each run")
    return args


def main() -> None:
    args = parse_arguments()
    if args.device == "cpu":
        use_cpu(args)
    names = ("device", "dtype", "attention_backend", "page_size", "max_requests", "draws", "fault_draws",
             "plain_draws", "engine_arguments", "ddtree_config")  # fmt: skip
    results = Results(args.output, {name: getattr(args, name) for name in names})
    cells = cells_of(args)
    with tempfile.TemporaryDirectory() as folder:
        collect(args, cells, results, Path(folder))
    missing = [cell.name for cell in cells if cell.name not in results.cells]
    if missing:
        raise SystemExit(f"time is over before {missing}: run the same command again")
    sys.exit(not judge(results, cells))


if __name__ == "__main__":
    main()
