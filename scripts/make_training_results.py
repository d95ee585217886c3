"""Puts the figures of a finished run of `ddtree train` into one results file.

python scripts/make_training_results.py runs/smollm2-135m --output results/training.json

Acceptance, corpus and speed are read from the run's folder, machine and versions from the model card of its
drafter. The steps/s are the median over the log, whose first rows hold the time that compiling takes.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

PROVENANCE = "Where it ran:\n\n```json\n"


def card_json(card: str, before: str) -> dict[str, Any]:
    """The JSON block of a model card after a text."""
    found: dict[str, Any] = json.loads(card.split(before)[1].split("```")[0])
    return found


def speed(log: Path, step_tokens: int) -> dict[str, float]:
    """Steps a second over the rows of a training log."""
    with log.open(encoding="utf-8") as rows:
        rates = [float(row["tokens_per_s"]) / step_tokens for row in csv.DictReader(rows)]
    return {
        "median_steps_per_s": round(median(rates), 2),
        "lowest": round(min(rates), 2),
        "highest": round(max(rates), 2),
    }


def training_results(run: Path) -> dict[str, Any]:
    """Everything the docs show of a run."""
    card = (run / "drafter" / "README.md").read_text(encoding="utf-8")
    recipe = card_json(card, "files by name:\n\n```json\n")
    train, evaluation = recipe["train"], recipe["evaluation"]
    acceptance = json.loads((run / "acceptance.json").read_text(encoding="utf-8"))
    provenance = card_json(card, PROVENANCE)
    return {
        "provenance": provenance,
        "prompts": evaluation["set_prompts"],
        "max_tokens": evaluation["max_tokens"],
        "dtype": recipe["target"]["dtype"],
        "weighting": train["weighting"],
        "labels": train["labels"],
        "steps": train["steps"],
        "sets": acceptance.get("sets", acceptance),
        "corpus": json.loads((run / "generation.json").read_text(encoding="utf-8")),
        "speed": speed(run / "log.csv", train["rows"] * train["row_tokens"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.write_text(json.dumps(training_results(args.run), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
