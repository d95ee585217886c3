"""Replays all outputs of a run and says which tokens and endings are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.trace.endings import ending_problem, is_overrun
from ddtree.trace.outputs import Output
from ddtree.trace.replay import GAP_STEPS, Replayer, Violation, swapped

FLOAT32_EPS = 1e-3
# The largest of so many near ties says little about the largest of as many others.
CALIBRATION_MARGIN = 2.0
# Least allowed gaps by number format, since few tokens may show no near tie at all. In 16 bits the margin
# times the rounding of a logit of 32, half a unit there: bfloat16 keeps 8 bits, so that a unit is 0.25, and
# float16 keeps 11, so that it is an eighth of that.
EPS_FLOORS = {"float32": FLOAT32_EPS, "bfloat16": 0.25, "float16": 0.03125}
MAX_PLAIN_GAP = 2.0  # logits; in bfloat16 plain SGLang's were at most 0.375 (docs/benchmarks.md)
PLANTED = 8  # outputs of a run that get a planted fault
PLANT_TOKENS = 16  # of an output that gets one: both orders of two tokens may be about as likely


@dataclass(slots=True)
class Judged:
    """The verdicts of a run's outputs, pooled; gaps in units of logits.

    Attributes:
        eps: the largest gap that was allowed.
        num_not_best: tokens with a gap above 0, allowed or not.
        violations: each wrong token with the name of its output.
        rounded: tokens that would be wrong by the replay's 16-bit format, while the target in float32
            chooses them too: there the replay rounded, not the engine.
        endings: outputs that ended where they should not have, with the reason.
        known_endings: those of SGLang 0.5.17 that speculation gives there (`is_overrun`).
        num_planted, num_planted_found, smallest_planted_gap: faults planted into copies of outputs.
    """

    eps: float
    num_outputs: int = 0
    num_tokens: int = 0
    num_not_best: int = 0
    max_gap: float = 0.0
    gaps_above: list[int] = field(default_factory=lambda: [0] * len(GAP_STEPS))
    violations: list[tuple[str, Violation]] = field(default_factory=list)
    rounded: list[tuple[str, Violation]] = field(default_factory=list)
    endings: list[tuple[str, str]] = field(default_factory=list)
    known_endings: list[tuple[str, str]] = field(default_factory=list)
    num_planted: int = 0
    num_planted_found: int = 0
    smallest_planted_gap: float | None = None

    @property
    def is_lossless(self) -> bool:
        """Whether no token and no ending is wrong."""
        return not self.violations and not self.endings

    def first_violations(self) -> list[tuple[str, Violation, int]]:
        """For each output with wrong tokens its name, the first of them, and how many there are."""
        counts: dict[str, int] = {}
        first: dict[str, Violation] = {}
        for name, violation in self.violations:
            counts[name] = counts.get(name, 0) + 1
            first.setdefault(name, violation)
        return [(name, violation, counts[name]) for name, violation in first.items()]

    def to_json(self) -> dict[str, Any]:
        """All of it, for a report."""
        return {
            "is_lossless": self.is_lossless,
            "eps": self.eps,
            "outputs": self.num_outputs,
            "tokens": self.num_tokens,
            "not_best": self.num_not_best,
            "max_gap": self.max_gap,
            "gaps_above": dict(zip(map(str, GAP_STEPS), self.gaps_above, strict=True)),
            "violations": [{"output": name, **asdict(found)} for name, found in self.violations],
            "rounded": [{"output": name, **asdict(found)} for name, found in self.rounded],
            "endings": [{"output": name, "problem": problem} for name, problem in self.endings],
            "known_endings": [{"output": name, "problem": problem} for name, problem in self.known_endings],
            "planted": self.num_planted,
            "planted_found": self.num_planted_found,
            "planted_smallest_gap": self.smallest_planted_gap,
        }


def judge_outputs(
    replayer: Replayer,
    outputs: Sequence[Output],
    eps: float,
    context_tokens: int | None = None,
    *,
    plant: bool = False,
    overrun_tokens: int = 0,
    watch: Callable[[int, Tensor], None] | None = None,
    exact: Callable[[], Replayer | None] | None = None,
) -> Judged:
    """Replay every token of finished outputs, each of at least one token.

    Args:
        eps: the largest gap that is allowed.
        context_tokens: where the engine's context ends, None where it is not known.
        plant: exchange tokens in copies of some outputs, to see that the replay finds such faults.
        overrun_tokens: the longest round of an engine that keeps overruns, else 0.
        watch: is told of each output's index and the target's logits [n, V] at its tokens.
        exact: loads the target in float32, or says that it cannot be had, where a 16-bit replay finds wrong
            tokens: a single near tie can round by far more than the largest of many.
    """
    judged = Judged(eps)
    for index, logits in replayer.logits(outputs):
        if watch is not None:
            watch(index, logits)
        output = outputs[index]
        verdict = replayer.judge(output, eps, logits)
        judged.num_outputs += 1
        judged.num_tokens += verdict.num_tokens
        judged.num_not_best += verdict.num_not_best
        judged.max_gap = max(judged.max_gap, verdict.max_gap)
        judged.gaps_above = [a + b for a, b in zip(judged.gaps_above, verdict.gaps_above, strict=True)]
        judged.violations += [(output.name, violation) for violation in verdict.violations]
        problem = ending_problem(output, replayer.stop_tokens, context_tokens)
        if problem is not None:
            is_known = is_overrun(output, replayer.stop_tokens, overrun_tokens)
            (judged.known_endings if is_known else judged.endings).append((output.name, problem))
        if plant and verdict.num_tokens >= PLANT_TOKENS and judged.num_planted < PLANTED:
            _plant(replayer, output, judged)
    if exact is not None and judged.violations:
        _look_again(exact(), outputs, judged)
    _sort(judged, outputs)
    return judged


def _look_again(exact: Replayer | None, outputs: Sequence[Output], judged: Judged) -> None:
    """Set aside wrong tokens that the target in float32 chooses, within eps."""
    if exact is None:
        return
    names = {name for name, _ in judged.violations}
    again = [output for output in outputs if output.name in names]
    wrong = {(again[index].name, violation.index)
             for index, logits in exact.logits(again)
             for violation in exact.judge(again[index], judged.eps, logits).violations}  # fmt: skip
    found, judged.violations = judged.violations, []
    for name, violation in found:
        is_wrong = (name, violation.index) in wrong
        (judged.violations if is_wrong else judged.rounded).append((name, violation))


def _plant(replayer: Replayer, output: Output, judged: Judged) -> None:
    fault = swapped(output)
    if fault is None:
        return
    gap = replayer.judge(fault, judged.eps).max_gap
    smallest = judged.smallest_planted_gap
    judged.num_planted += 1
    judged.num_planted_found += gap > judged.eps
    judged.smallest_planted_gap = gap if smallest is None else min(gap, smallest)


def _sort(judged: Judged, outputs: Sequence[Output]) -> None:
    """Put findings in the order of the outputs; they were replayed by length."""
    places = {output.name: place for place, output in enumerate(outputs)}
    for found in (judged.violations, judged.rounded, judged.endings, judged.known_endings):
        found.sort(key=lambda entry: places[entry[0]])


def calibrated_eps(dtype: str, gaps: Iterable[float]) -> float | None:
    """Largest gap that is allowed in a number format, from the largest gaps of plain greedy runs.

    None in a 16-bit format without a run to measure it on; fixed in float32.
    """
    if dtype == "float32":
        return FLOAT32_EPS
    largest = max(gaps, default=None)
    return None if largest is None else measured_eps(dtype, largest)


def measured_eps(dtype: str, largest: float) -> float:
    """Twice the largest gap of plain greedy runs, and no less than the floor of the number format."""
    return max(CALIBRATION_MARGIN * largest, EPS_FLOORS[dtype])


def largest_plain_gap(replayer: Replayer, outputs: Sequence[Output], source: str) -> float:
    """The largest gap of plain decoding's greedy outputs, which `source` names.

    Raises:
        ConfigError: there are none, or they are far off the target.
    """
    greedy = [output for output in outputs if output.read_sampling().is_greedy(output.order)]
    if not greedy:
        raise ConfigError(
            f"{source} has no greedy output of plain decoding to calibrate on: give some with temperature 0"
        )
    largest = judge_outputs(replayer, greedy, math.inf).max_gap
    # A token that is no near tie makes every fault pass: the outputs are another model's.
    if largest > MAX_PLAIN_GAP:
        raise ConfigError(
            f"{source}: a token of plain decoding misses the target's choice by {largest:.3g}, and at most "
            f"{MAX_PLAIN_GAP:g} can be rounding: its outputs are not this target's, or not plain decoding's"
        )
    return largest
