"""Where two texts of one request part, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddtree.trace.pairing import Pair
from ddtree.trace.replay import Replayer
from ddtree.trace.run_file import Answer, sampling_of

Verdict = Literal["tie", "difference", "undecided"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two outputs differ; what comes behind it has another context.

    Attributes:
        request: its name in the runs.
        index, position: in the output; in prompt and output.
        token_a, token_b: what was emitted there, None where the output had ended.
        verdict: `tie`, rounding explains it; `difference`, it does not; `undecided`, nothing says which.
        margin: how far the two tokens, or the best two, are apart there, in logits; None where not known.
        gap_a, gap_b: by how much each token misses the target's own choice, by replay.
        reason: what the verdict rests on.
    """

    request: str
    index: int
    position: int
    token_a: int | None
    token_b: int | None
    verdict: Verdict
    reason: str
    margin: float | None = None
    gap_a: float | None = None
    gap_b: float | None = None

    def sentence(self) -> str:
        """All of it in one line."""
        shown = ["ended" if token is None else str(token) for token in (self.token_a, self.token_b)]
        return (
            f"{self.request}: texts part at token {self.index} (position {self.position}): A {shown[0]}, "
            f"B {shown[1]}; {self.reason}"
        )


def divergences(pairs: Sequence[Pair], eps: float | None, replayer: Replayer | None) -> list[Divergence]:
    """The first divergence of each pair of outputs that should be equal, with its verdict."""
    found: list[tuple[Pair, int]] = []
    for pair in pairs:
        place = first_difference(pair.a.output.tokens, pair.b.output.tokens)
        if place is not None and not _was_cut(pair, place):
            found.append((pair, place))
    replayed = {} if replayer is None else _replayed_gaps(found, eps, replayer)
    return [_judged(pair, place, eps, replayed.get(number)) for number, (pair, place) in enumerate(found)]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where two outputs differ, one may have ended there; None for equal ones."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _was_cut(pair: Pair, place: int) -> bool:
    """Whether the shorter output ends there since its caller went away."""
    shorter = next((a for a in (pair.a, pair.b) if len(a.output.tokens) == place), None)
    if shorter is None:
        return False
    finish = shorter.output.finish
    return finish is not None and finish["type"] in ("cancel", "abort")


def _replayed_gaps(
    found: Sequence[tuple[Pair, int]], eps: float | None, replayer: Replayer
) -> dict[int, tuple[float, float]]:
    """Gaps of both tokens at each divergence that has two, by the target's own logits there."""
    both = [
        number for number, (pair, place) in enumerate(found)
        if place < min(len(pair.a.output.tokens), len(pair.b.output.tokens))
    ]  # fmt: skip
    cut = [_up_to(found[number][0].a, found[number][1]) for number in both]
    gaps: dict[int, tuple[float, float]] = {}
    for index, logits in replayer.logits([answer.output for answer in cut]):
        number = both[index]
        pair, place = found[number]
        # The context is the same, so one pass of the target judges both tokens.
        per_token = [
            float(replayer.gaps(_up_to(answer, place).output, eps or 0.0, logits)[0][place])
            for answer in (pair.a, pair.b)
        ]
        gaps[number] = (per_token[0], per_token[1])
    return gaps


def _up_to(answer: Answer, place: int) -> Answer:
    return replace(answer, output=replace(answer.output, tokens=tuple(answer.output.tokens[: place + 1])))


def _judged(pair: Pair, place: int, eps: float | None, gaps: tuple[float, float] | None) -> Divergence:
    tokens = [
        answer.output.tokens[place] if place < len(answer.output.tokens) else None
        for answer in (pair.a, pair.b)
    ]
    margin = None if gaps is not None else traced_margin(pair, place)
    verdict, reason = _verdict(pair, tokens, eps, gaps, margin)
    return Divergence(
        pair.name, place, len(pair.a.output.prompt) + place, tokens[0], tokens[1], verdict, reason,
        margin=abs(gaps[0] - gaps[1]) if gaps is not None else margin,
        gap_a=None if gaps is None else gaps[0], gap_b=None if gaps is None else gaps[1],
    )  # fmt: skip


def _verdict(
    pair: Pair, tokens: Sequence[int | None], eps: float | None, gaps: tuple[float, float] | None,
    margin: float | None,
) -> tuple[Verdict, str]:  # fmt: skip
    if None in tokens:
        ended, other = ("A", "B") if tokens[0] is None else ("B", "A")
        return "difference", f"{ended} ended there and {other} went on"
    if gaps is not None:
        if eps is None:
            return "undecided", (
                f"A misses the target's choice by {gaps[0]:.4g}, B by {gaps[1]:.4g}, and how much is "
                "rounding is not known: give --eps or --eps-from"
            )
        wrong = [f"{name} misses the target's choice by {gap:.4g}" for name, gap in
                 zip("AB", gaps, strict=True) if gap > eps]  # fmt: skip
        if wrong:
            return "difference", f"{' and '.join(wrong)}, more than {eps:.4g}"
        return "tie", f"both are within {eps:.4g} of the target's choice ({gaps[0]:.4g}, {gaps[1]:.4g})"
    if margin is None:
        return "undecided", "nothing says how close the two tokens are: name the target with --model"
    if eps is None:
        return "undecided", f"the margin is {margin:.4g}, and how much is rounding is not known: give --eps"
    if margin > eps:
        return "difference", f"the target's margin there is {margin:.4g}, more than {eps:.4g}"
    return "tie", f"the target's margin there is {margin:.4g}, at most {eps:.4g}"


def traced_margin(pair: Pair, place: int) -> float | None:
    """How far apart the best tokens are at a place, by the traces' own figures; None where they say nothing.

    They are of raw logits, so that they say nothing of a sampled choice or one after penalties. Where both
    traces have them, the two emitted tokens' own log-probabilities count too.
    """
    sampling, order = sampling_of(pair.a), pair.a.output.order
    if not sampling.is_greedy(order) or sampling.changes_logits:
        return None
    known = [
        answer.margins[place] for answer in (pair.a, pair.b) if place < len(answer.margins)
    ]  # fmt: skip
    figures = [entry for entry in known if entry is not None and all(map(math.isfinite, entry))]
    if not figures:
        return None
    margins = [margin for _, margin in figures]
    if len(figures) == 2:
        margins.append(abs(figures[0][0] - figures[1][0]))
    return max(margins)
