"""What does each choice of a training recipe give? Trains variants of it on one corpus and measures each.

A variant is the recipe with other values, read from a TOML file of `[[variant]]` tables with a `name` and
`"table.key" = value` lines. All variants train for --steps steps, with the schedule that fits them, on the
corpus of --run (a run folder whose data stage is done), save those that change [data], which generate
their own. Each is measured offline on held-out conversations and on the recipe's sets. The last line is JSON.

    python benchmarks/train_ablations.py recipes/smollm2-135m.toml benchmarks/data/ablations.toml \\
        --run runs/smollm2-135m --steps 1000 --output results/train_ablations.json
"""

from __future__ import annotations

import argparse
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import write_results
from ddtree.train.evaluation import accept_lengths
from ddtree.train.pipeline import run_pipeline
from ddtree.train.recipe import Recipe, load_recipe
from ddtree.train.reporting import PipelineOptions, SilentReporter, Stage
from ddtree.train.training_log import read_log


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("variants", type=Path)
    parser.add_argument("--run", type=Path, required=True, help="run folder with the corpus")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="*", help="names of the variants to run")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def varied(recipe: Recipe, changes: Mapping[str, Any], steps: int) -> Recipe:
    """The recipe with a variant's values, shortened to `steps` and measured at the end alone."""
    recipe = replace(
        recipe,
        train=replace(recipe.train, steps=steps, checkpoint_every=steps),
        evaluation=replace(recipe.evaluation, every=0),
    )
    for name, value in changes.items():
        table, _, key = name.partition(".")
        value = tuple(value) if isinstance(value, list) else value
        recipe = replace(recipe, **{table: replace(getattr(recipe, table), **{key: value})})
    return recipe


def run_variant(recipe: Recipe, folder: Path, corpus: Path, device: str) -> dict[str, Any]:
    """Train and measure one variant; returns its figures."""
    folder.mkdir(parents=True)
    texts = corpus.parent / "texts"
    texts.mkdir(exist_ok=True)
    (folder / "texts").symlink_to(texts.resolve())
    own_data = not corpus.exists()
    if not own_data:
        (folder / "data").symlink_to(corpus.resolve())
    stages = ((Stage.DATA,) if own_data else ()) + (Stage.TRAIN, Stage.EVALUATE)
    started = time.perf_counter()
    run_pipeline(recipe, folder, PipelineOptions(stages, device, resume=True), SilentReporter())
    torch.compiler.reset()
    rows = read_log(folder / "log.csv")
    # The first rows hold the time that compiling takes, which a median leaves out.
    rates = [row.tokens_per_s / (recipe.train.rows * recipe.train.row_tokens) for row in rows]
    return {
        "accept_length": accept_lengths(folder / "acceptance.json", recipe.train.steps),
        "loss": rows[-1].loss,
        "median_steps_per_s": round(median(rates), 2),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    args = parse_arguments()
    base = load_recipe(args.recipe)
    variants = tomllib.loads(args.variants.read_text(encoding="utf-8"))["variant"]
    rows = []
    for variant in variants:
        name = variant.pop("name")
        if args.only and name not in args.only:
            continue
        recipe = varied(base, variant, args.steps)
        changes_data = any(key.startswith(("data.", "target.")) for key in variant)
        corpus = args.run / ("none" if changes_data else "data")
        folder = args.run / "ablations" / name.replace(" ", "-")
        figures = run_variant(recipe, folder, corpus, args.device)
        rows.append({"name": name, "changes": variant, "steps": recipe.train.steps, **figures})
        print(rows[-1], flush=True)
        write_results(args.output, {"ablations": rows})


if __name__ == "__main__":
    main()
