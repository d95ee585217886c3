"""Draft trees in stock SGLang over tensor-parallel ranks: are they right, and how fast is it?

Two pairs are served at every --tp-size: the one that ships, with heads added so that ranks can share them
(`pad_heads`), and a random target of Qwen3-8B's shape whose greedy text is known (`make_random_pair`), below
which drafts of a set quality are planted (`sglang_planted`). The parts, each with a limit of its own:

    ranks    every rank builds the same tree in every round, ties made plentiful too (`sglang_rank_trees`)
    replay   the shipped pair's outputs over ranks, teacher-forced through the unpadded target on one device
    bench    plain decoding, DFLASH and trees as in `bench_sglang`, arms interleaved; planted texts checked
    profile  where a round's time goes, what ranks exchange told apart (`profile_sglang_round`)
    gather   bytes and times of the candidates' exchange against gathering all logits (`topk_gather`)

A part that fails is named in the verdict and the others go on. Runs resume from --output. Needs SGLang, and
as many GPUs as the largest --tp-size.

    python benchmarks/bench_sglang_tensor_parallel.py --output results/sglang_tensor_parallel.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench_sglang import ARMS, cell_name, figures, greedy, summary
from check_sglang_replay import block_size, is_lossless, judge_all, load_replayer, requests_of
from check_sglang_replay import cell_name as replay_name
from make_random_pair import QWEN3_8B, RESERVED_TOKENS
from planted_acceptance import settings as planted_settings
from profile_sglang_round import measure as profile_round
from sglang_common import BENCHMARKS, Clock, EngineDied, Results, sglang_arguments
from sglang_fleet import ENVIRONMENT, Fleet
from tensor_parallel_pairs import (
    PAIRS,
    RANDOM,
    SHIPPED,
    EngineSpec,
    Group,
    ServedPair,
    random_pair,
    shipped_pair,
    weights_folder,
)
from tensor_parallel_plan import REPLAY_CONCURRENCY, Plan

PARTS = ("ranks", "replay", "bench", "profile", "gather")
LIMITS_S = {"start": 280, "ranks": 75, "replay": 75, "bench": 150, "profile": 90, "gather": 60, "judge": 50}
RESERVED = {"gather": "gather", "judge": "replay"}  # what needs no engine, by the part that asks for it
RANK_ROUNDS, RANK_PROMPTS, RANK_CONCURRENCY = 1000, 24, 4
GATHER_CANDIDATES = (15, 31, 32)  # of budgets 15, 31 and 63


class Run:
    """One program's parts over one fleet.

    Args:
        args: the parsed arguments.
        results: where cells go.
        folder: for engines and what their plugins write.
        pairs: by name.
    """

    def __init__(
        self, args: argparse.Namespace, results: Results, folder: Path, pairs: Mapping[str, ServedPair]
    ) -> None:
        self.args, self.results, self.folder, self.pairs = args, results, folder, pairs
        self.plan = Plan(args, results, folder, pairs)
        self.fleet = Fleet(args, folder, results)
        later_s = sum(LIMITS_S[part] for part, needs in RESERVED.items() if needs in args.parts)
        self.clock, self.engine_clock = Clock(args.max_seconds), Clock(args.max_seconds - later_s)
        self.failed: dict[str, str] = dict(results.verdict.get("failed", {}))

    def limit(self, part: str) -> Clock:
        """The clock of a part: its own limit or what is left of the whole."""
        whole = self.clock if part in RESERVED else self.engine_clock
        return Clock(min(self.args.limits.get(part, LIMITS_S[part]), whole.left_s()))

    def attempt(self, title: str, work: Callable[[], None]) -> None:
        """Do a part's work; what goes wrong is written down."""
        begin = time.monotonic()
        self.failed.pop(title, None)
        try:
            work()
        except (Exception, SystemExit) as error:  # the other parts go on
            self.failed[title] = f"{type(error).__name__}: {error}"[-2000:]
            print(f"{title} failed: {error}", flush=True)
        self.results.verdict["failed"] = self.failed
        self.results.write()
        print(f"-- {title}: {time.monotonic() - begin:.1f} s", flush=True)

    def measure_ranks(self, group: Group) -> None:
        """Let every check engine make enough rounds, then compare what its ranks wrote down."""
        clock = self.limit("ranks")
        for spec in self.plan.ranks(group):
            if self.fleet.is_alive(spec.name):
                self.attempt(f"ranks {spec.name}", partial(self._rank_cell, spec, clock))

    def _rank_cell(self, spec: EngineSpec, clock: Clock) -> None:
        kinds = rank_requests(self.pairs[spec.group.pair], self.args.max_tokens)
        rounds, batches = 0, 0
        while rounds < self.args.rank_rounds and (batches == 0 or clock.left_s() > 0):
            made = self.fleet.run(spec.name, kinds[batches % 2], RANK_CONCURRENCY)
            errors = [answer["error"] for answer in made["answers"] if "error" in answer]
            if errors:
                raise RuntimeError(f"{len(errors)} requests failed, the first with: {errors[0]}")
            self.fleet.call(spec.name, "flush")
            logs = spec.rank_logs()
            batches, rounds = batches + 1, min(log["rounds"] for log in logs)
        hashes = [{log["tree_hash"] for log in logs}, {log["score_hash"] for log in logs}]
        counts = {name: logs[0][name] for name in ("rounds", "trees", "nodes", "tied_trees")}
        same = len(logs) == spec.group.tp_size and all(len(found) == 1 for found in hashes)
        cell = {"ranks": len(logs), **counts, "equal": same and len({log["rounds"] for log in logs}) == 1,
                "tree_hash": logs[0]["tree_hash"], "score_hash": logs[0]["score_hash"]}  # fmt: skip
        self.results.add(f"ranks {spec.name}", cell)
        print(f"ranks {spec.name}", cell, flush=True)

    def collect_replay(self, group: Group) -> None:
        """Let the shipped pair answer what is judged later."""
        clock, requests = self.limit("replay"), self._replay_requests()
        for arm, concurrency, kind in self.plan.replay(group):
            name = group.engine(arm)
            if clock.left_s() > 0 and self.fleet.is_alive(name):
                made = self.fleet.run(name, requests[kind], concurrency, warm=True)
                self.results.add(f"replay {group} {replay_name(arm, concurrency, kind)}",
                                 {"answers": made["answers"]})  # fmt: skip

    def _replay_requests(self) -> dict[str, list[dict[str, Any]]]:
        prompts = self.pairs[SHIPPED].prompts(self.args.replay_prompts)
        return {kind: requests_of(kind, prompts, self.args.max_tokens, with_regex=False)
                for kind in ("greedy", "sampled")}  # fmt: skip

    def judge_replay(self) -> None:
        """Replay a group's outputs; what is judged are all of its answered cells."""
        rows = self.results.verdict.setdefault("replay", {})
        for group in self.plan.groups():
            cells = {name.removeprefix(f"replay {group} "): cell for name, cell in self.results.cells.items()
                     if name.startswith(f"replay {group} ")}  # fmt: skip
            if not cells or str(group) in rows or not all("answers" in cell for cell in cells.values()):
                continue
            held = Results(None, {})
            held.cells = cells
            held.engines = {arm: self.results.engines[group.engine(arm)] for arm in REPLAY_CONCURRENCY}
            names = [(arm, int(count), kind) for arm, count, kind in (name.split(" ") for name in cells)]
            names.sort(key=lambda cell: cell[0] != "plain")
            judge_all(load_replayer(self.args), held, names, self._replay_requests(), self.args.dtype,
                      block_size(self.args))  # fmt: skip
            rows[str(group)] = held.verdict
            for name in cells:  # the outputs have served
                tokens = [answer["tokens"] for answer in cells[name]["answers"]]
                self.results.cells[f"replay {group} {name}"] = {
                    "outputs": len(tokens), "max_id": max(max(row) for row in tokens),
                }  # fmt: skip
        self.results.write()

    def measure_bench(self, group: Group) -> None:
        """Fill the bench cells of a group."""
        clock, pair = self.limit("bench"), self.pairs[group.pair]
        for arm, concurrency, repeat in self.plan.bench(group):
            name = group.engine(arm)
            if clock.left_s() < 0 or not self.fleet.is_alive(name):
                continue
            prompts = pair.prompts(max(self.args.least_prompts, 2 * concurrency))
            requests = greedy(prompts, self.args.max_tokens, stream=False)
            try:
                made = self.fleet.run(name, requests, concurrency, warm=True)
            except EngineDied as error:
                print(error, flush=True)
                continue
            cell = figures(made, streamed=False)
            cell["max_id"] = max(max(answer["tokens"]) for answer in made["answers"])
            if pair.planted is not None:
                cell |= pair.planted.check(arm, prompts, made["answers"])
            title = cell_name(arm, concurrency, str(group), repeat)
            self.results.add(title, cell)
            print(title, f"{cell['tokens_per_s']} tokens/s", flush=True)

    def measure_profile(self, group: Group) -> None:
        clock = self.limit("profile")
        for arm, concurrency in self.plan.profile(group):
            name = group.engine(arm)
            if clock.left_s() > 0 and self.fleet.is_alive(name):
                title = f"profile {group} {arm} {concurrency}"
                self.attempt(title, partial(self._profile_cell, title, name, group, concurrency))

    def _profile_cell(self, title: str, engine: str, group: Group, concurrency: int) -> None:
        self.fleet.call(engine, "flush")
        prompts = self.pairs[group.pair].prompts(concurrency)
        cell = profile_round(self.fleet.process(engine), prompts, concurrency, self.args.max_tokens)
        self.results.add(title, cell)

    def measure_gather(self, tp_size: int) -> None:
        """Bytes and times of both exchanges, in processes of their own."""
        name = f"gather tp{tp_size}"
        if tp_size == 1 or name in self.results.cells:
            return
        output = self.folder / f"gather-{tp_size}.json"
        command = [sys.executable, str(BENCHMARKS / "topk_gather.py"), "--ranks", str(tp_size),
                   "--batches", *map(str, self.args.concurrency),
                   "--candidates", *map(str, GATHER_CANDIDATES),
                   "--vocab-size", str(self.args.random_shape["vocab_size"]),
                   "--output", str(output)]  # fmt: skip
        try:
            subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, stdout=subprocess.DEVNULL,
                           timeout=max(self.limit("gather").left_s(), 1))  # fmt: skip
        except subprocess.SubprocessError as error:
            raise RuntimeError(str(error)) from error
        self.results.add(name, json.loads(output.read_text(encoding="utf-8")))

    def summarise(self) -> None:
        """Make the verdict of the cells, those of earlier runs too."""
        groups = self.plan.measured()
        args = argparse.Namespace(
            concurrency=self.args.concurrency, arms=self.args.arms, repeats=self.args.repeats,
            sets=[str(group) for group in groups],
        )  # fmt: skip
        cells, verdict = self.results.cells, self.results.verdict
        verdict["table"] = summary(cells, args)
        verdict["planted"] = planted_settings()
        verdict["shards"] = {str(group): self._shards(group) for group in groups}
        verdict["label"] = "" if self.args.attention_backend == "fa3" else "without FA3"
        self.results.write()

    def _shards(self, group: Group) -> dict[str, int]:
        """The largest id that a group committed, against the vocabulary and a rank's part of it."""
        vocab_size = self.pairs[group.pair].vocab_size
        seen = [cell["max_id"] for name, cell in self.results.cells.items()
                if f" {group} " in f" {name} " and "max_id" in cell]  # fmt: skip
        return {"vocab_size": vocab_size, "rank_tokens": -(-vocab_size // group.tp_size),
                "max_id": max(seen, default=-1)}  # fmt: skip


def rank_requests(pair: ServedPair, max_tokens: int) -> list[list[dict[str, Any]]]:
    """Batches that check engines answer in turn, greedy and with all sampling settings that they can take."""
    prompts = pair.prompts(RANK_PROMPTS)
    batches = [requests_of(kind, prompts, max_tokens, with_regex=False) for kind in ("greedy", "sampled")]
    if pair.has_tokenizer:
        return batches
    for request in batches[1]:
        request["sampling"].pop("min_new_tokens", None)  # for which SGLang asks the tokenizer
    return batches


def run_tp_size(run: Run, tp_size: int, wait_for_weights: Callable[[], None]) -> None:
    """All that needs engines at one number of ranks."""
    groups, specs = [group for group in run.plan.groups() if group.tp_size == tp_size], []
    # The shipped pair's engines compile the kernels while the random pair's weights are written.
    for group in sorted(groups, key=lambda group: group.pair == RANDOM):
        needed = run.plan.specs(group)
        if needed and group.pair == RANDOM:
            run.attempt("weights", wait_for_weights)
        if group.pair != RANDOM or "weights" not in run.failed:
            run.fleet.start(needed)
            specs += needed
    run.attempt(
        f"start tp{tp_size}",
        partial(run.fleet.wait, [spec.name for spec in specs], run.limit("start").left_s()),
    )
    for group in groups:
        run.measure_ranks(group)
        run.attempt(f"replay {group}", partial(run.collect_replay, group))
    for group in sorted(groups, key=lambda group: group.pair != RANDOM):
        run.attempt(f"bench {group}", partial(run.measure_bench, group))
        run.measure_profile(group)
    run.fleet.close()


def problems(results: Results) -> list[str]:
    """What went wrong: parts, ranks that differ, outputs that do not replay, texts not the known one."""
    verdict, cells = results.verdict, results.cells.items()
    found = list(verdict.get("failed", {}))
    found += [name for name, cell in cells if name.startswith("ranks ") and not cell["equal"]]
    found += [name for name, cell in cells if cell.get("wrong_texts")]
    for group, made in verdict.get("replay", {}).items():
        found += [f"replay {group} {name}" for name, row in made["rows"].items() if not is_lossless(row)]
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sglang_arguments(parser, max_requests=16)
    add = parser.add_argument
    add("--tp-size", nargs="+", type=int, default=[2, 1])
    add("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--arms", nargs="+", default=list(ARMS))
    add("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    add("--repeats", type=int, default=5)
    add("--least-prompts", type=int, default=4, help="of a bench cell, which has two a request at once")
    add("--replay-prompts", type=int, default=40)
    add("--rank-rounds", type=int, default=RANK_ROUNDS)
    add("--max-tokens", type=int, default=128)
    add("--call-limit-s", type=float, default=120, help="an engine that takes longer to answer is dead")
    add("--limits", type=json.loads, default={}, metavar="JSON",
        help=f"seconds by part, beside {json.dumps(LIMITS_S)}")  # fmt: skip
    add("--random-shape", type=json.loads, default=dict(QWEN3_8B), metavar="JSON")
    add("--random-block", type=int, default=16)
    add("--reserved-tokens", type=int, default=RESERVED_TOKENS)
    add("--weights-folder", type=Path, help="where both pairs are written; in memory or on disk if not given")
    add("--kv-heads", type=int, default=4, help="of the padded pair; a multiple of every --tp-size")
    add("--seed", type=int, default=0)
    # Engines that start together find memory taken meanwhile: the pools are bounded by --pool-tokens instead.
    parser.set_defaults(memory_share=0.93, pool_tokens=24_576, context_tokens=4096)
    args = parser.parse_args(argv)
    wrong = [size for size in args.tp_size if args.kv_heads % size]
    if wrong:
        parser.error(f"--kv-heads {args.kv_heads} is not allowed: --tp-size {wrong[0]} does not divide it")
    args.max_requests = max(args.max_requests, *args.concurrency)
    return args


def main() -> None:
    args = arguments()
    os.environ.update(ENVIRONMENT)
    names = ("attention_backend", "dtype", "page_size", "max_requests", "max_tokens", "least_prompts",
             "pool_tokens", "context_tokens", "engine_arguments", "ddtree_config", "random_shape",
             "kv_heads", "seed")  # fmt: skip
    results = Results(args.output, {name: getattr(args, name) for name in names})
    folder = Path(tempfile.mkdtemp(prefix="ddtree-tp-"))
    weights = args.weights_folder or weights_folder()
    pairs = {SHIPPED: shipped_pair(args, weights / SHIPPED), RANDOM: random_pair(args, weights / RANDOM)}
    planted = pairs[RANDOM].planted
    writer = planted.start_writing(args) if planted is not None and RANDOM in args.pairs else None

    def wait_for_weights() -> None:
        if writer is not None and writer.wait() != 0:
            raise SystemExit(f"the random pair was not written: its program ended with {writer.returncode}")

    run = Run(args, results, folder, pairs)
    try:
        for tp_size in args.tp_size:
            run_tp_size(run, tp_size, wait_for_weights)
        for tp_size in args.tp_size:
            if "gather" in args.parts:
                run.attempt(f"gather tp{tp_size}", partial(run.measure_gather, tp_size))
        if "replay" in args.parts:
            run.attempt("judge", run.judge_replay)
        run.attempt("summary", run.summarise)
    finally:
        run.fleet.close()
        shutil.rmtree(folder, ignore_errors=True)
    found = problems(results)
    print(f"problems: {found}" if found else "no problem")
    sys.exit(int(bool(found)))


if __name__ == "__main__":
    main()
