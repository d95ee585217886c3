"""How fast does SGLang serve with draft trees? Against its own DFLASH and plain decoding, arms interleaved.

One engine process an arm, all alive side by side on one GPU, only one of them at work at a time. For each
repeat, concurrency and prompt set every arm answers the same prompts greedily, in an order that turns from
one repeat to the next, so that drifts hit all alike; its prefix cache is emptied before. A cell is tokens
over the wall time of that batch, prefill included, and the accept length: tokens a verify pass, without a
request's first token, which prefill makes. --latency adds one streamed repeat for times to the first token
and between tokens. Arms `embedded:B` are this project's own engine, one request at a time, in this process:
accept lengths of `ddtree:B` at one request are compared with theirs by a paired bootstrap over prompts. Runs
resume from --output, which is written after each cell. Needs a GPU and SGLang.

    python benchmarks/bench_sglang.py --output results/bench_sglang.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import SETS, load_prompts
from ddtree.trace.statistics import paired_interval
from sglang_common import (
    Clock,
    EngineDied,
    EngineProcess,
    Results,
    chat_prompts,
    engines,
    sglang_arguments,
)

ARMS = ("plain", "dflash", "ddtree:15", "ddtree:31", "ddtree:63")
BASELINE = "dflash"
# Stock DFLASH ends the server at the context limit; what it reserves past a request's end is less than this.
CONTEXT_MARGIN_TOKENS = 512
WARM_UP_TOKENS = 24


def cell_name(arm: str, concurrency: int, name: str, repeat: int | str) -> str:
    return f"{arm} {concurrency} {name} {repeat}"


def plan(args: argparse.Namespace) -> Iterator[tuple[str, int, str, int | str]]:
    """Cells in the order in which they are measured: a whole grid of each repeat before the next."""
    repeats: list[int | str] = [*range(args.repeats)]
    if args.latency:
        repeats.append("streamed")
    for number, repeat in enumerate(repeats):
        for concurrency in args.concurrency:
            for name in args.sets:
                turn = (number + args.sets.index(name)) % len(args.arms)
                for arm in [*args.arms[turn:], *args.arms[:turn]]:
                    if not arm.startswith("embedded") or (concurrency, repeat) == (1, 0):
                        yield arm, concurrency, name, repeat


def greedy(prompts: Sequence[Sequence[int]], max_tokens: int, *, stream: bool) -> list[dict[str, Any]]:
    """Requests that decode prompts greedily."""
    sampling = {"temperature": 0.0, "max_new_tokens": max_tokens}
    return [{"tokens": list(tokens), "sampling": sampling, "stream": stream} for tokens in prompts]


def figures(made: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    """A cell of the answers to one batch.

    Raises:
        RuntimeError: a request was refused or broke off.
    """
    answers = made["answers"]
    for answer in answers:
        if "error" in answer or answer["finish"]["type"] == "abort":
            raise RuntimeError(f"a request failed: {answer.get('error', answer.get('finish'))}")
    tokens = [len(answer["tokens"]) for answer in answers]
    cell = {
        "wall_s": round(made["wall_s"], 4),
        "tokens_per_s": round(sum(tokens) / made["wall_s"], 1),
        "tokens": tokens,
        "rounds": [answer["rounds"] for answer in answers],
    }
    if streamed:
        first = [(answer["first_s"] - answer["begin_s"]) * 1e3 for answer in answers]
        between = [
            (answer["end_s"] - answer["first_s"]) * 1e3 / (count - 1)
            for answer, count in zip(answers, tokens, strict=True) if count > 1
        ]  # fmt: skip
        cell["first_token_ms"] = round(statistics.median(first), 2)
        cell["between_tokens_ms"] = round(statistics.median(between), 3)
    return cell


def embedded_answers(
    engine: Any, budget: int, prompts: Sequence[Sequence[int]], max_tokens: int
) -> dict[str, Any]:
    """What this project's own engine answers, one request at a time, in the shape of an SGLang engine's."""
    from ddtree import Mode, Request, SamplingParams

    answers, begin = [], time.perf_counter()
    for prompt in prompts:
        request = Request(tuple(prompt), SamplingParams(max_tokens=max_tokens), Mode.TREE, budget)
        result = engine.generate(request)
        answer = {"tokens": result.tokens, "rounds": result.stats.verify_ct, "finish": {"type": "stop"}}
        answers.append(answer)
    return {"wall_s": time.perf_counter() - begin, "answers": answers}


def load_embedded(args: argparse.Namespace) -> Any:
    """This project's own engine of the same pair."""
    from ddtree import Engine, EngineConfig
    from ddtree.config import Dtype

    return Engine.load(EngineConfig(model=args.model, drafter=args.drafter, dtype=Dtype(args.dtype)))


class Bench:
    """Measures cells; an arm whose engine died is left out of what follows.

    Args:
        args: the parsed arguments.
        prompts: by set, in tokens.
        results: where cells go.
    """

    def __init__(
        self, args: argparse.Namespace, prompts: dict[str, list[list[int]]], results: Results
    ) -> None:
        self._args, self._prompts, self._results = args, prompts, results
        self._warm: set[tuple[str, int]] = set()
        self._embedded: Any = None
        self.dead: set[str] = set()

    def measure(
        self, processes: dict[str, EngineProcess], arm: str, concurrency: int, name: str, repeat: int | str
    ) -> None:
        """Measure a cell and keep it."""
        streamed = repeat == "streamed"
        requests = greedy(self._prompts[name], self._args.max_tokens, stream=streamed)
        try:
            if arm.startswith("embedded"):
                self._embedded = self._embedded or load_embedded(self._args)
                budget = int(arm.partition(":")[2])
                made = embedded_answers(self._embedded, budget, self._prompts[name], self._args.max_tokens)
            else:
                self._prepare(processes[arm], arm, concurrency)
                made = processes[arm].call("run", requests=requests, concurrency=concurrency)
        except EngineDied as error:
            self.dead.add(arm)
            self._results.engines[arm] = {"died": str(error)[-4000:]}
            print(error, flush=True)
            return
        cell = figures(made, streamed=streamed)
        self._results.add(cell_name(arm, concurrency, name, repeat), cell)
        print(cell_name(arm, concurrency, name, repeat), f"{cell['tokens_per_s']} tokens/s", flush=True)

    def _prepare(self, process: EngineProcess, arm: str, concurrency: int) -> None:
        if arm not in self._results.engines:
            self._results.engines[arm] = process.call("info")
        check_context(self._prompts, self._args.max_tokens, self._results.engines[arm]["context_tokens"])
        if (arm, concurrency) not in self._warm:
            prompts = [row for rows in self._prompts.values() for row in rows][: max(concurrency, 2)]
            warm_up = greedy(prompts, WARM_UP_TOKENS, stream=False)
            process.call("run", requests=warm_up, concurrency=concurrency)
            self._warm.add((arm, concurrency))
        process.call("flush")


def check_context(prompts: dict[str, list[list[int]]], max_tokens: int, context_tokens: int) -> None:
    """Refuse prompts that come near the context limit, where stock DFLASH ends the server.

    Raises:
        SystemExit: prompt and new tokens come within `CONTEXT_MARGIN_TOKENS` of it.
    """
    longest = max(len(row) for rows in prompts.values() for row in rows)
    if longest + max_tokens + CONTEXT_MARGIN_TOKENS > context_tokens:
        raise SystemExit(
            f"a prompt of {longest} tokens and {max_tokens} new ones come within {CONTEXT_MARGIN_TOKENS} of "
            f"the context of {context_tokens}: take fewer --max-tokens or other sets"
        )


def accept_length(cells: Sequence[dict[str, Any]]) -> float | None:
    """Tokens a verify pass, pooled; None for an arm without verify passes."""
    rounds = sum(sum(cell["rounds"]) for cell in cells)
    tokens = sum(sum(cell["tokens"]) - len(cell["tokens"]) for cell in cells)
    return round(tokens / rounds, 4) if rounds else None


def summary(cells: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row an arm, concurrency and set: medians over repeats, and ratios to DFLASH repeat by repeat."""
    rows = []
    for concurrency in args.concurrency:
        for name in args.sets:
            for arm in args.arms:
                repeats = [r for r in range(args.repeats) if cell_name(arm, concurrency, name, r) in cells]
                if not repeats:
                    continue
                kept = [cells[cell_name(arm, concurrency, name, repeat)] for repeat in repeats]
                rates = [cell["tokens_per_s"] for cell in kept]
                row = {
                    "concurrency": concurrency, "set": name, "arm": arm, "repeats": len(kept),
                    "tokens_per_s": statistics.median(rates), "slowest": min(rates), "fastest": max(rates),
                    "accept_length": accept_length(kept),
                }  # fmt: skip
                bases = [cells.get(cell_name(BASELINE, concurrency, name, repeat)) for repeat in repeats]
                ratios = [
                    rate / base["tokens_per_s"] for rate, base in zip(rates, bases, strict=True) if base
                ]
                if ratios:
                    row["ratio_to_dflash"] = round(statistics.median(ratios), 3)
                    row["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
                streamed = cells.get(cell_name(arm, concurrency, name, "streamed"), {})
                row |= {key: value for key, value in streamed.items() if key.endswith("_ms")}
                rows.append(row)
    return rows


def against_embedded(cells: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Accept lengths at one request against the embedded engine's, paired by prompt."""
    rows = []
    for arm in args.arms:
        kind, _, budget = arm.partition(":")
        for name in args.sets:
            ours = cells.get(cell_name(f"ddtree:{budget}", 1, name, 0))
            other = cells.get(cell_name(arm, 1, name, 0))
            if kind != "embedded" or ours is None or other is None:
                continue
            tokens = [[float(count - 1) for count in cell["tokens"]] for cell in (ours, other)]
            rounds = [(float(a), float(b)) for a, b in zip(ours["rounds"], other["rounds"], strict=True)]
            low, high = paired_interval(tokens[0], tokens[1], rounds)
            plugin, reference = accept_length([ours]), accept_length([other])
            assert reference is not None  # it has rounds
            rows.append({
                "set": name, "node_budget": int(budget), "plugin": plugin, "embedded": reference,
                "difference_interval_95": [round(low, 4), round(high, 4)],
                "interval_share": [round(low / reference, 4), round(high / reference, 4)],
            })  # fmt: skip
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the summary as a table."""
    print(f"{'at once':>7} {'set':<10} {'arm':<12} {'tokens/s':>9} {'x DFLASH':>8} {'accept':>6}")
    for row in rows:
        ratio, length = row.get("ratio_to_dflash", ""), row["accept_length"] or ""
        print(
            f"{row['concurrency']:>7} {row['set']:<10} {row['arm']:<12} {row['tokens_per_s']:>9} {ratio:>8} "
            f"{length:>6}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sglang_arguments(parser, max_requests=32)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="also embedded:B")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--latency", action="store_true")
    # Engines that start together find memory taken meanwhile: the pools are bounded by --pool-tokens instead.
    parser.set_defaults(memory_share=0.5)
    args = parser.parse_args()
    args.max_requests = max(args.max_requests, *args.concurrency)
    names = ("model", "drafter", "attention_backend", "dtype", "page_size", "max_requests", "prompts",
             "max_tokens", "engine_arguments", "ddtree_config")  # fmt: skip
    results = Results(args.output, {name: getattr(args, name) for name in names})
    results.verdict["label"] = "" if args.attention_backend == "fa3" else "without FA3"
    prompts = {name: chat_prompts(args.model, load_prompts(name, args.prompts)) for name in args.sets}
    clock, bench = Clock(args.max_seconds), Bench(args, prompts, results)
    missing = [cell for cell in plan(args) if cell_name(*cell) not in results.cells]
    arms = [arm for arm in args.arms if any(cell[0] == arm for cell in missing)]
    with engines([arm for arm in arms if not arm.startswith("embedded")], args) as processes:
        for cell in missing:
            if cell[0] not in bench.dead and clock.left_s() > 0:
                bench.measure(processes, *cell)
        results.verdict["table"] = summary(results.cells, args)
        results.verdict["against_embedded"] = against_embedded(results.cells, args)
        results.write()
    show(results.verdict["table"])
    for row in results.verdict["against_embedded"]:
        print(row)
    left = sum(cell_name(*cell) not in results.cells for cell in missing)
    print(f"{left} cells left" if left else "all cells measured")
    sys.exit(int(bool(bench.dead)))


if __name__ == "__main__":
    main()
