"""Holds the draft trees of two runs against each other where they stand on the same text.

Ties may go either way, so that node sets may differ; the scores of the best B prefixes may not. So trees are
compared by their sizes and their sorted scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddtree.trace.divergence import first_difference
from ddtree.trace.findings import Finding
from ddtree.trace.pairing import Pair
from ddtree.trace_format import TraceRound

SCORE_TOLERANCE = 1e-4  # of summed log-probabilities, in float32


@dataclass(frozen=True, slots=True)
class TreeComparison:
    """Trees of the same root behind the same text, with the same mode and node budget.

    Attributes:
        compared: so many.
        max_score_difference: the largest difference of sorted scores.
        problems: a finding for each kind of difference, the first such tree named.
    """

    compared: int
    max_score_difference: float
    problems: tuple[Finding, ...]


def compare_trees(pairs: Sequence[Pair], *, is_exact: bool) -> TreeComparison | None:
    """Compare all trees that both runs have; None without any.

    Args:
        is_exact: whether both runs are in float32, so that scores must agree within 1e-4. In 16 bits the
            drafter's rounding is larger, and only sizes are a verdict.
    """
    compared, largest, first_rounds = 0, 0.0, 0
    sizes: list[str] = []
    scores: list[str] = []
    in_first_rounds: list[str] = []
    for pair in pairs:
        for one, other in aligned_rounds(pair):
            compared += 1
            is_first = one.round == other.round == 1
            first_rounds += is_first
            where = f"{pair.name}, position {one.position}"
            if len(one.tokens) != len(other.tokens):
                sizes.append(
                    f"{where}: A's tree has {len(one.tokens) - 1} nodes, B's {len(other.tokens) - 1}"
                )
                continue
            difference = score_difference(one, other)
            largest = max(largest, difference)
            if is_exact and difference > SCORE_TOLERANCE:
                (in_first_rounds if is_first else scores).append(
                    f"{where}: sorted scores of the trees differ by {difference:.3g}, more than "
                    f"{SCORE_TOLERANCE:g}"
                )
    if not compared:
        return None
    problems = []
    if sizes:
        problems.append(Finding("tree_sizes", f"{sizes[0]} ({len(sizes)} of {compared} trees)"))
    if in_first_rounds or (scores and not first_rounds):
        told = in_first_rounds + scores
        problems.append(Finding(
            "draft_input",
            f"{told[0]} ({len(told)} of {compared} trees, {len(in_first_rounds)} of {first_rounds} of first "
            "rounds)",
        ))  # fmt: skip
    elif scores:
        problems.append(Finding(
            "draft_context",
            f"{scores[0]} ({len(scores)} of {compared} trees, none of the {first_rounds} of first rounds)",
        ))  # fmt: skip
    return TreeComparison(compared, largest, tuple(problems))


def aligned_rounds(pair: Pair) -> Iterator[tuple[TraceRound, TraceRound]]:
    """Rounds with trees at the same position behind the same text, of one mode and node budget.

    A round of mode ar has drafted nothing: its root alone is no tree.
    """
    split = first_difference(pair.a.output.tokens, pair.b.output.tokens)
    end = len(pair.a.output.prompt) + (len(pair.a.output.tokens) if split is None else split)
    others = {entry.position: entry for entry in pair.b.rounds if entry.tokens and entry.mode != "ar"}
    for one in pair.a.rounds:
        other = others.get(one.position)
        if other is None or not one.tokens or one.position >= end or one.root != other.root:
            continue
        if (one.mode, one.node_budget) == (other.mode, other.node_budget):
            yield one, other


def score_difference(a: TraceRound, b: TraceRound) -> float:
    """The largest difference of the sorted scores of two trees of one size, in float64."""
    pairs = zip(sorted(a.log_probs, reverse=True), sorted(b.log_probs, reverse=True), strict=True)
    return max((abs(one - other) for one, other in pairs), default=0.0)
