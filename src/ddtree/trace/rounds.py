"""Do the rounds of one trace fit together, and fit the text that they made?

Each check needs nothing but the trace itself: where a round stands, what it stands on, that it committed
what was emitted, and, where the trace has whole trees, that the walk went as far as the tree allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddtree.trace_format import TraceRound

SCORE_SLACK = 1e-4  # sums of float32 log-probabilities


class Problem(NamedTuple):
    """What is wrong in a round: a word for its kind and a sentence."""

    kind: str
    text: str


def round_problems(
    prompt: Sequence[int],
    tokens: Sequence[int],
    rounds: Sequence[TraceRound],
    *,
    walks_whole: bool = True,
    may_skip: bool = False,
) -> Iterator[Problem]:
    """Problems of a request's rounds, in order; of each round the first.

    Args:
        walks_whole: whether the engine follows a path to its end, as it does unless told otherwise.
        may_skip: whether tokens may come between rounds, as the one of SGLang's prefill after it put a
            request back for want of memory.
    """
    text, position = [*prompt, *tokens], len(prompt)
    for entry in rounds:
        if may_skip and entry.position > position:
            position = entry.position
        if entry.position != position:
            yield Problem(
                "position",
                f"round {entry.round} stands at position {entry.position}; the rounds before it end at "
                f"{position}",
            )
            return  # all later ones would be off, too
        is_last = entry is rounds[-1]
        yield from list(_problems_of(text, entry, walks_whole=walks_whole and not is_last))[:1]
        position += len(entry.accept_tokens)


def _problems_of(text: Sequence[int], entry: TraceRound, *, walks_whole: bool) -> Iterator[Problem]:
    name, root = (
        f"round {entry.round} at position {entry.position}",
        text[entry.position : entry.position + 1],
    )
    if root and entry.root != root[0]:
        yield Problem("root", f"{name} has the root {entry.root}, but {root[0]} was committed there")
    for offset, token in enumerate(entry.accept_tokens, entry.position + 1):
        if offset < len(text) and token != text[offset]:
            yield Problem(
                "commit",
                f"{name} committed {token} at position {offset}, where the output has {text[offset]}",
            )
            break
    if entry.accept_indices and len(entry.accept_indices) != len(entry.accept_tokens):
        yield Problem(
            "path",
            f"{name} has a path of {len(entry.accept_indices)} nodes and committed "
            f"{len(entry.accept_tokens)} tokens",
        )
    elif entry.tokens:
        yield from (Problem(kind, f"{name}: {what}") for kind, what in _tree_problems(entry, walks_whole))


def _tree_problems(entry: TraceRound, walks_whole: bool) -> Iterator[tuple[str, str]]:
    if not len(entry.tokens) == len(entry.parents) == len(entry.log_probs):
        yield "tree", "its tree has lists of different lengths"
        return
    children: dict[tuple[int, int], int] = {}
    for node, parent in enumerate(entry.parents):
        if not (parent == -1 if node == 0 else 0 <= parent < node):
            yield "tree", f"node {node} of its tree has the parent {parent}"
            return
        if node and entry.log_probs[node] > entry.log_probs[parent] + SCORE_SLACK:
            yield "tree", f"node {node} of its tree is likelier than its parent {parent}"
        if node:
            children.setdefault((parent, entry.tokens[node]), node)
    if entry.tokens[0] != entry.root:
        yield "root", f"its tree stands on {entry.tokens[0]}, its root is {entry.root}"
    at = 0
    for number, token in enumerate(entry.accept_tokens[:-1], 1):
        node = entry.accept_indices[number] if number < len(entry.accept_indices) else -1
        if not 0 < node < len(entry.tokens) or (entry.parents[node], entry.tokens[node]) != (at, token):
            yield "path", f"node {node} of its path is no child of node {at} with the token {token}"
            return
        at = node
    further = children.get((at, entry.accept_tokens[-1])) if entry.accept_tokens else None
    if walks_whole and further is not None:
        yield (
            "walk",
            f"its walk stopped at node {at}, though the child {further} carries the next token "
            f"{entry.accept_tokens[-1]}",
        )


def sibling_share(rounds: Sequence[TraceRound]) -> float | None:
    """Share of correct drafts that were not their parent's likeliest child; None without trees.

    A walk that only follows the likeliest child, as on a chain, has 0.
    """
    total, others = 0, 0
    for entry in rounds:
        if not entry.tokens:
            continue
        first: dict[int, int] = {}
        for node, parent in enumerate(entry.parents):
            first.setdefault(parent, node)
        for node in entry.accept_indices[1:]:
            total += 1
            others += first[entry.parents[node]] != node
    return others / total if total else None
