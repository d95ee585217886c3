"""Runs of a pretended decoder, whose trees and texts are known, to plant differences into."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddtree.trace_format import (
    TraceEnd,
    TraceHeader,
    TraceRequest,
    TraceRound,
    to_line,
)

DEPTH = 4
SAMPLING = {"temperature": 0.0, "max_tokens": 40}


def header(**changes: Any) -> TraceHeader:
    fields = {
        "engine": "embedded", "target": {"name": "tiny", "folder_sha256": "aa"},
        "drafter": {"name": "drafter", "folder_sha256": "bb"}, "versions": {}, "device": "cpu",
        "dtype": "float32", "settings": {}, "time_utc": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return TraceHeader(**(fields | changes))


def text_of(request: int, length: int = 41) -> list[int]:
    return [(request * 31 + place * place * 7 + place) % 89 + 3 for place in range(length)]


def tree_at(text: Sequence[int], place: int) -> tuple[list[int], list[int], list[float]]:
    """A tree behind the token at a place: at each depth the right token, now first, now second child."""
    tokens, parents, log_probs = [text[place]], [-1], [0.0]
    parent = 0
    for depth in range(1, DEPTH + 1):
        if place + depth >= len(text) or (place + depth) % 5 == 0:
            break
        right, wrong = text[place + depth], 92
        for token in (right, wrong) if (place + depth) % 3 else (wrong, right):
            tokens.append(token)
            parents.append(parent)
            log_probs.append(log_probs[parent] - 0.3 - 0.5 * (len(tokens) % 2))
        parent = tokens.index(right, len(tokens) - 2)
    return tokens, parents, log_probs


def rounds_of(name: str, prompt: Sequence[int], text: Sequence[int], *, chain_only: bool) -> list[TraceRound]:
    """Rounds that walk the trees at each place; a chain-only walk follows first children alone."""
    rounds, place = [], 0
    while place + 1 < len(text):
        tokens, parents, log_probs = tree_at(text, place)
        path, at = [0], 0
        while True:
            below = [node for node, parent in enumerate(parents) if parent == at and node > 0]
            right = [node for node in (below[:1] if chain_only else below)
                     if tokens[node] == text[place + len(path)]]  # fmt: skip
            if not right:
                break
            at = right[0]
            path.append(at)
        accepted = list(text[place + 1 : place + 1 + len(path)])
        accepted += [7] * (len(path) - len(accepted))  # the last round goes past the end
        rounds.append(TraceRound(
            id=name, round=len(rounds) + 1, position=len(prompt) + place, root=text[place], mode="tree",
            node_budget=8, accept_tokens=tuple(accepted), accept_indices=tuple(path), round_ms=1.0,
            tokens=tuple(tokens), parents=tuple(parents), log_probs=tuple(log_probs),
            target=tuple((-0.1, 3.0) for _ in range(min(len(path), len(text) - place - 1))),
        ))  # fmt: skip
        place += len(path)
    return rounds


def records(
    num_requests: int = 10,
    *,
    chain_only: bool = False,
    changes: dict[str, Any] | None = None,
    **sampling: Any,
) -> list[Any]:
    """Header and all lines of a run in mode tree."""
    found: list[Any] = [header(**(changes or {}))]
    for number in range(num_requests):
        prompt, text, name = [number + 3, 50, 60], text_of(number), f"r{number}"
        found.append(TraceRequest(
            id=name, prompt_tokens=tuple(prompt), sampling=SAMPLING | sampling, mode="tree", node_budget=8
        ))  # fmt: skip
        found += rounds_of(name, prompt, text, chain_only=chain_only)
        found.append(TraceEnd(id=name, tokens=tuple(text), finish_reason="length", stats={},
                              first_target=((-0.1, 3.0),)))  # fmt: skip
    return found


def write_trace(path: Path, lines: Sequence[Any]) -> Path:
    path.write_bytes(b"".join(map(to_line, lines)))
    return path


def edited(lines: Sequence[Any], pick: Callable[[Any], bool], edit: Callable[[Any], Any]) -> list[Any]:
    """The lines with the first that is picked replaced."""
    found, is_done = [], False
    for line in lines:
        if not is_done and pick(line):
            found.append(edit(line))
            is_done = True
        else:
            found.append(line)
    assert is_done
    return found


def write_outputs(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
