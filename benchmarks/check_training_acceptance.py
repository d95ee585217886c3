"""Is the acceptance that training reports what the engine measures live?

The engine decodes each prompt greedily: plainly, then by chain and by trees. Offline, `ddtree.train`
measures the same drafter on the plain texts, from its trainable form. In float32 every round must agree;
in bfloat16 near ties part texts, so the pooled accept lengths are compared by a paired bootstrap over
prompts. The last line is JSON.

    python benchmarks/check_training_acceptance.py --prompts 8 --max-tokens 96 \\
        --output results/training_acceptance_cpu_fp32.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from check_acceptance import AcceptLengths, agrees, whole_rounds
from common import (
    SETS,
    engine_arguments,
    load_engine,
    load_prompts,
    load_stock,
    progress,
    write_results,
)
from ddtree import Engine, Mode, Request, SamplingParams
from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.load import read_weights
from ddtree.models import resolve_drafter
from ddtree.trace.statistics import paired_interval
from ddtree.train.acceptance import (
    AcceptanceTable,
    Column,
    PackedLogits,
    Text,
    drafter_texts_logits,
    measure_acceptance,
)
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.target_features import FrozenTarget

Rounds = dict[Column, list[list[int]]]  # accept length of each whole round of each prompt


def trainable_drafter(folder: Path, engine: Engine) -> TrainableDrafter:
    """The drafter in a checkpoint folder as training has it, on the engine's device."""
    config = DFlashConfig.from_path(folder)
    drafter = TrainableDrafter(config, engine.max_context_tokens + config.block_size)
    drafter.load_state_dict(read_weights(folder, config))
    return drafter.to(engine.device).eval()


def offline_logits(args: argparse.Namespace, engine: Engine, drafter: TrainableDrafter) -> PackedLogits:
    """The drafter on packed texts, fed by the target's stock modules."""
    model = load_stock(args.model, engine).model
    return drafter_texts_logits(drafter, FrozenTarget(model, drafter.config.target_layer_ids, "dense"))


def live(
    engine: Engine, prompts: Sequence[str], columns: Sequence[Column], max_tokens: int, step: Any
) -> tuple[list[Text], Rounds]:
    """The engine's plain texts, and its rounds on the same prompts."""
    sampling, texts = SamplingParams(max_tokens=max_tokens), []
    rounds: Rounds = {column: [] for column in columns}
    for prompt in prompts:
        tokens = engine.encode(prompt)
        answer = engine.generate(Request(tokens, sampling, Mode.AR)).tokens
        texts.append(Text(np.array([*tokens, *answer]), len(tokens)))
        for column in columns:
            mode, budget = (Mode.CHAIN, "auto") if column == "chain" else (Mode.TREE, column)
            observer = AcceptLengths()
            got = engine.generate(Request(tokens, sampling, mode, budget, observer)).tokens
            rounds[column].append(whole_rounds(observer.lengths, len(got)))
        step()
    return texts, rounds


def compared(table: AcceptanceTable, column: Column, rounds: list[list[int]]) -> dict[str, Any]:
    """Engine against offline for one column, in the words of `check_acceptance`."""
    offline = [lengths.tolist() for lengths in table.accept_lengths[column]]
    tokens = [[float(sum(lengths)) for lengths in side] for side in (rounds, offline)]
    counts = [(float(len(got)), float(len(expected))) for got, expected in zip(rounds, offline, strict=True)]
    engine_tau = sum(tokens[0]) / sum(count for count, _ in counts)
    row = table.pooled(column)
    low, high = paired_interval(tokens[0], tokens[1], counts)
    return {
        "engine": round(engine_tau, 4),
        "reference": round(row.accept_length, 4),
        "reference_interval_95": [round(end, 4) for end in table.interval(column)],
        "rounds": row.rounds,
        "difference_interval_95": [round(low, 4), round(high, 4)],
        "interval_share_of_reference": [round(end / row.accept_length, 4) for end in (low, high)],
        "prompts_with_equal_rounds": f"{sum(map(list.__eq__, rounds, offline))} of {len(rounds)}",
    }


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
    folder = resolve_drafter(args.drafter, args.model)
    if folder is None:
        parser.error("--drafter none: there is no acceptance without a drafter")
    engine = load_engine(args)
    drafter = trainable_drafter(folder, engine)
    logits, depth = offline_logits(args, engine, drafter), drafter.config.draft_depth
    columns: list[Column] = ["chain", *args.budgets]
    sets: dict[str, dict[str, Any]] = {}
    with progress("prompts", len(args.sets) * args.prompts) as step:
        for name in args.sets:
            prompts = load_prompts(name, args.prompts)
            texts, rounds = live(engine, prompts, columns, args.max_tokens, step)
            table = measure_acceptance(logits, texts, args.budgets, depth, engine.device)
            sets[name] = {str(column): compared(table, column, rounds[column]) for column in columns}
            print(name, sets[name])
    results = {
        "dtype": args.dtype,
        "drafter": args.drafter,
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "sets": sets,
    }
    write_results(args.output, results)
    rows = [row for table in sets.values() for row in table.values()]
    sys.exit(0 if all(agrees(row, is_exact=args.dtype == "float32") for row in rows) else 1)


if __name__ == "__main__":
    main()
