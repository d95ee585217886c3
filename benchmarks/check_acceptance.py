"""Does the engine accept what the algorithm says? Accept lengths against an offline reference.

The engine decodes each prompt greedily. Offline, the plain text is teacher-forced through the stock
transformers target; each round drafts from its features, builds the tree with the paper's heap in
float64 and follows the text. In float32 every round must agree; in bfloat16 near ties part texts, so
the pooled accept lengths are compared by a paired bootstrap over prompts. The last line is JSON.

    python benchmarks/check_acceptance.py --dtype float32 --prompts 8 --max-tokens 96 \\
        --output results/acceptance_cpu_fp32.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import (
    SETS,
    engine_arguments,
    load_engine,
    load_prompts,
    load_stock,
    progress,
    write_results,
)
from ddtree import Engine, Mode, Request, RoundStats, SamplingParams
from ddtree.draft.dflash_model import DFlashDrafter
from ddtree.engine.stock_target import StockTarget
from ddtree.layers.window import Window
from ddtree.trace.statistics import paired_interval
from ddtree.tree.build_reference import build_draft_tree

LARGEST_SHARE = 0.03


class AcceptLengths:
    """Observer that keeps the accept length of each round."""

    wants_trees = False
    wants_stages = False

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def on_round(self, stats: RoundStats) -> None:
        self.lengths.append(stats.num_accept_tokens)


class Offline(NamedTuple):
    """What the offline reference runs on."""

    target: StockTarget
    drafter: DFlashDrafter


def reference_accept(logits: Tensor, text: Sequence[int], budget: int | None) -> int:
    """Correct drafts of one round by the heap (None: chain), logits [draft_depth, vocab]."""
    log_probs = torch.log_softmax(logits.float(), -1)
    if budget is None:
        matches = 0
        for token, expected in zip(log_probs.argmax(-1).tolist(), text, strict=False):
            if token != expected:
                break
            matches += 1
        return matches
    topk = min(budget, logits.shape[-1])
    values, tokens = log_probs.sort(dim=-1, descending=True, stable=True)  # ties to the lower id
    nodes = build_draft_tree(values[:, :topk].double().cpu().numpy(), budget)
    ids = tokens[:, :topk].tolist()
    paths = {tuple(ids[depth][rank] for depth, rank in enumerate(node.ranks)) for node in nodes}
    matches = 0
    while matches < len(text) and tuple(text[: matches + 1]) in paths:
        matches += 1
    return matches


def offline_lengths(
    offline: Offline, prompt: tuple[int, ...], text: tuple[int, ...], budget: int | None
) -> list[int]:
    """Accept length of each whole round on a text."""
    tokens = torch.tensor([*prompt, *text], device=offline.target.device)
    window = Window.at(0, torch.arange(tokens.shape[0], device=tokens.device), None)
    cache = offline.target.new_kv_cache(tokens.shape[0])
    taps = offline.target.forward(
        tokens, window, cache, offline.drafter.target_layer_ids, last_only=True
    ).taps
    assert taps is not None
    context = offline.drafter.new_context(tokens.shape[0] + offline.drafter.block_size)
    lengths, known, root = [], 0, len(prompt)
    while root < tokens.shape[0] - 1:
        positions = torch.arange(known, root, device=tokens.device)
        offline.drafter.append(context, taps[known:root], Window.at(known, positions, None))
        block = offline.drafter.draft_window(root)
        logits = offline.drafter.draft_logits(tokens[root : root + 1], context, block)
        accept_length = reference_accept(logits, tokens[root + 1 :].tolist(), budget) + 1
        known, root = root, root + accept_length
        if root < tokens.shape[0]:
            lengths.append(accept_length)
    return lengths


def whole_rounds(lengths: list[int], num_tokens: int) -> list[int]:
    """Rounds that lie inside the text, whose first token prefill made."""
    kept, total = [], 1
    for length in lengths:
        total += length
        if total <= num_tokens:
            kept.append(length)
    return kept


def check_set(
    engine: Engine, offline: Offline, prompts: list[str], budget: int | None, max_tokens: int, step: Any
) -> dict[str, Any]:
    """Engine against reference on one prompt set and budget."""
    sampling = SamplingParams(max_tokens=max_tokens)
    pairs: list[tuple[list[int], list[int]]] = []
    for prompt in prompts:
        tokens, observer = engine.encode(prompt), AcceptLengths()
        mode = Mode.CHAIN if budget is None else Mode.TREE
        text = engine.generate(Request(tokens, sampling, Mode.AR)).tokens
        got = engine.generate(Request(tokens, sampling, mode, budget or "auto", observer)).tokens
        with torch.inference_mode():
            expected = offline_lengths(offline, tokens, text, budget)
        pairs.append((whole_rounds(observer.lengths, len(got)), expected))
        step()
    totals = [[float(sum(lengths)) for lengths in side] for side in zip(*pairs, strict=True)]
    rounds = [(float(len(got)), float(len(expected))) for got, expected in pairs]
    engine_tau = sum(totals[0]) / sum(count for count, _ in rounds)
    reference_tau = sum(totals[1]) / sum(count for _, count in rounds)
    low, high = paired_interval(totals[0], totals[1], rounds)
    return {
        "engine": round(engine_tau, 4),
        "reference": round(reference_tau, 4),
        "difference_interval_95": [round(low, 4), round(high, 4)],
        "interval_share_of_reference": [round(low / reference_tau, 4), round(high / reference_tau, 4)],
        "prompts_with_equal_rounds": f"{sum(got == expected for got, expected in pairs)} of {len(pairs)}",
    }


def agrees(row: dict[str, Any], *, is_exact: bool) -> bool:
    """Whether they agree: every round in float32, else an interval around 0 of at most 3 %."""
    if is_exact:
        equal, total = row["prompts_with_equal_rounds"].split(" of ")
        return bool(equal == total)
    low, high = row["interval_share_of_reference"]
    return bool(-LARGEST_SHARE <= low <= 0 <= high <= LARGEST_SHARE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engine_arguments(parser, dtype="float32")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--budgets", type=int, nargs="*", default=[16, 64])
    args = parser.parse_args()
    engine = load_engine(args)
    drafter = engine.pair.drafter
    assert isinstance(drafter, DFlashDrafter)
    offline = Offline(load_stock(args.model, engine), drafter)
    table: dict[str, dict[str, Any]] = {}
    budgets = [None, *args.budgets]
    with progress("prompts", len(args.sets) * len(budgets) * args.prompts) as step:
        for name in args.sets:
            prompts = load_prompts(name, args.prompts)
            for budget in budgets:
                key = "chain" if budget is None else str(budget)
                row = check_set(engine, offline, prompts, budget, args.max_tokens, step)
                table.setdefault(name, {})[key] = row
                print(name, key, row)
    results = {"dtype": args.dtype, "prompts": args.prompts, "max_tokens": args.max_tokens, "sets": table}
    write_results(args.output, results)
    rows = [row for columns in table.values() for row in columns.values()]
    sys.exit(0 if all(agrees(row, is_exact=args.dtype == "float32") for row in rows) else 1)


if __name__ == "__main__":
    main()
