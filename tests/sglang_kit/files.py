"""The files through which driver, scheduler and test tell each other things, in a run's own folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "DDTREE_TEST_FOLDER"  # names that folder
PLANS_FILE = "plans.json"  # request id -> prompt and output to plant
CONTROL_FILE = "control.json"  # what the driver asks of the recorder in the current step
ROUNDS_FILE = "rounds.jsonl"  # a line a request and round
POOL_FILE = "pool.jsonl"  # a line a cache flush: what of the pools is free before it


def append_line(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none if nothing was written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
