"""Where in their rounds do requests go wrong first? What is wrong in the verify pass follows from it.

A fault of the mask or the positions shows at nodes of a window; one of the KV cache shows at the next round's
root, and whether the rounds before it had anything to move tells a commit that moves nothing from a write to
foreign slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddtree.errors import counted
from ddtree.trace.findings import Finding, Kind
from ddtree.trace.run_file import Answer
from ddtree.trace_format import TraceRound


class Place(NamedTuple):
    """The node of whose logits an emitted token was chosen.

    Attributes:
        round_index: from 0; -1 for the prefill, whose token no node gave.
        has_sibling: whether a node of its path stands behind a sibling; None where the tree is not known.
        has_moved: whether a round before it had a path that did not stand at the window's front.
    """

    round_index: int
    depth: int
    column: int
    has_sibling: bool | None
    has_moved: bool

    @property
    def is_displaced(self) -> bool:
        """Whether its column is not its depth, so that its slot is not its position."""
        return self.column != self.depth


PREFILL = Place(-1, 0, 0, None, has_moved=False)


class FirstWrong(NamedTuple):
    """A request and the place in its output where it is first wrong, None where all of it is right."""

    answer: Answer
    place: int | None


def located(requests: Sequence[FirstWrong]) -> list[Finding]:
    """What the places say at which requests are first wrong."""
    votes: Counter[Kind] = Counter()
    examples: dict[Kind, str] = {}
    right: Counter[str] = Counter()
    for answer, first in requests:
        for number, place in places_of(answer):
            if number == first:
                kind = kind_of(place)
                votes[kind] += 1
                examples.setdefault(kind, _shown(answer, number, place))
                break
            right["displaced"] += place.is_displaced and place.has_sibling is False
            right["unmoved"] += place.round_index > 0 and not place.has_moved
    _settle(votes, examples, "verify_mask", "verify_positions")
    _settle(votes, examples, "commit_kv", "foreign_kv")
    if votes["verify_mask"] and not right["displaced"]:
        votes["verify_window"] += votes.pop("verify_mask")
        examples.setdefault("verify_window", examples["verify_mask"])
    total = sum(first is not None for _, first in requests)
    return [
        Finding(kind, _sentence(kind, number, total, examples[kind], right))
        for kind, number in votes.most_common() if number
    ]  # fmt: skip


def kind_of(place: Place) -> Kind:
    """What a request that is first wrong there points to."""
    if place.is_displaced:
        if place.has_sibling is None:
            return "verify_window"
        return "verify_mask" if place.has_sibling else "verify_positions"
    if place.round_index <= 0:
        return "first_token" if place.depth == 0 else "verify_window"
    return "commit_kv" if place.has_moved else "foreign_kv"


def _settle(votes: Counter[Kind], examples: dict[Kind, str], narrow: Kind, wide: Kind) -> None:
    """What explains some requests alone, and can be all that is wrong in the others, explains them all."""
    if votes[narrow] and votes[wide]:
        votes[wide] += votes.pop(narrow)
        examples.pop(narrow)


def _sentence(kind: Kind, number: int, total: int, example: str, right: Counter[str]) -> str:
    text = f"{number} of {counted(total, 'wrong request')} first wrong there, as {example}"
    if kind == "verify_mask":
        text += f"; {counted(right['displaced'], 'node')} off their depth's column, no sibling before, right"
    if kind == "commit_kv":
        known = counted(right["unmoved"], "token")
        text += f"; {known} after rounds with nothing to move right"
        text += "" if right["unmoved"] else ", so that foreign_kv is possible, too"
    return text


def _shown(answer: Answer, number: int, place: Place) -> str:
    name = f"{answer.output.name} at token {number}"
    if place.round_index < 0:
        return f"{name}, the prefill's"
    entry = answer.rounds[place.round_index]
    return f"{name}, round {entry.round}, depth {place.depth}, column {place.column}"


def places_of(answer: Answer) -> Iterator[tuple[int, Place]]:
    """Each place of an output with the node that gave its token; those that no round gave are left out."""
    yield 0, PREFILL
    has_moved = False
    for index, entry in enumerate(answer.rounds):
        start = entry.position - len(answer.output.prompt) + 1
        siblings = _siblings_before(entry)
        has_sibling = None if siblings is None else False
        for depth, column in enumerate(entry.accept_indices):
            if siblings is not None:
                has_sibling = has_sibling or siblings[column]
            if start + depth < len(answer.output.tokens):
                yield start + depth, Place(index, depth, column, has_sibling, has_moved)
        has_moved = has_moved or list(entry.accept_indices) != list(range(len(entry.accept_indices)))


def _siblings_before(entry: TraceRound) -> list[bool] | None:
    """For each node whether a sibling stands before it; None without a tree that holds the path."""
    if not entry.tokens or not all(0 <= column < len(entry.parents) for column in entry.accept_indices):
        return None
    seen: set[int] = set()
    found = []
    for parent in entry.parents:
        found.append(parent in seen)
        seen.add(parent)
    return found
