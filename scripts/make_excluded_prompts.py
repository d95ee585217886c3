"""Writes benchmarks/data/excluded_prompts.sha256: which prompts a training corpus must never hold.

Run: python scripts/make_excluded_prompts.py FILE.jsonl [FILE.jsonl ...]

The files are the whole evaluation sets, of which the repository holds the first rows only. Hashed are all
turns, the bare `prompt` where a row has one, and a turn without its last line where that line is the
instruction that a set puts after every question.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree.train.prompts import normalised_prompt_hash

OUTPUT = Path(__file__).parents[1] / "benchmarks" / "data" / "excluded_prompts.sha256"


MIN_SHARED, MIN_WORDS = 10, 4  # of a last line that is an instruction


def instructions(turns: list[str]) -> set[str]:
    """Last lines that many turns share and that are sentences."""
    counts = Counter(turn.rpartition("\n")[2] for turn in turns if "\n" in turn)
    return {line for line, n in counts.items() if n >= MIN_SHARED and len(line.split()) >= MIN_WORDS}


def texts_of(rows: list[dict[str, Any]]) -> Iterator[str]:
    turns = [turn for row in rows for turn in row["turns"]]
    shared = instructions(turns)
    yield from turns
    yield from (question for question, _, line in (turn.rpartition("\n") for turn in turns) if line in shared)
    yield from (row["prompt"] for row in rows if "prompt" in row)


def main(paths: list[str]) -> None:
    rows = [json.loads(line) for path in paths for line in Path(path).read_text("utf-8").splitlines()]
    hashes = sorted({normalised_prompt_hash(text) for text in texts_of(rows)})
    OUTPUT.write_text("\n".join(hashes) + "\n", encoding="utf-8")
    print(f"{len(hashes)} hashes of {len(rows)} rows in {OUTPUT}")


if __name__ == "__main__":
    main(sys.argv[1:])
