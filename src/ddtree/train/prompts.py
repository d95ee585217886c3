"""The user's own prompts, and the prompts of evaluation sets that must never be trained on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError, short_repr

HASH = re.compile(r"[0-9a-f]{64}")
HASHES_SUFFIX = ".sha256"


def normalised_prompt_hash(text: str) -> str:
    """sha256 in hexadecimal of a text with its case folded and its white space collapsed."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass")).hexdigest()


def load_excluded(paths: Sequence[Path]) -> frozenset[str]:
    """Hashes of every turn in JSONL files, and those listed, one a line, in `.sha256` files.

    Raises:
        ConfigError: a file that cannot be read or a line of another form, with its number.
    """
    hashes: set[str] = set()
    for path in paths:
        if path.suffix == HASHES_SUFFIX:
            hashes.update(read_hashes(path))
        else:
            hashes.update(normalised_prompt_hash(turn) for turns in read_turns(path) for turn in turns)
    return frozenset(hashes)


def load_prompts(path: Path) -> list[str]:
    """The first turn of every row of a JSONL file, `{"prompt": text}` or `{"turns": [text, ...]}`.

    Raises:
        ConfigError: a file that cannot be read or a line of another form, with its number.
    """
    return [turns[0] for turns in read_turns(path)]


def read_turns(path: Path) -> Iterator[list[str]]:
    for number, line in read_lines(path):
        yield turns_of(line, f"{path}, line {number}")


def read_hashes(path: Path) -> Iterator[str]:
    for number, line in read_lines(path):
        if HASH.fullmatch(line) is None:
            raise ConfigError(f"{path}, line {number}: {short_repr(line)} is no sha256 of 64 digits 0-9a-f")
        yield line


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {str(path)!r}: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.strip()


def turns_of(line: str, where: str) -> list[str]:
    """The turns of a row of a JSONL file."""
    try:
        row: Any = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if isinstance(row, dict) and "turns" in row:
        turns = row["turns"]
    else:
        turns = [row["prompt"]] if isinstance(row, dict) and "prompt" in row else None
    if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t.strip() for t in turns)):
        allowed = '{"prompt": "text"} or {"turns": ["text", ...]}'
        raise ConfigError(f"{where}: {short_repr(row)} is not allowed; write {allowed}")
    return turns
