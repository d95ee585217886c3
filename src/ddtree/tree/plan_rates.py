"""How fast plans decoded the same texts: measurements, forecasts and their ratios with 95 % intervals.

Intervals are over texts (delta method for a ratio of sums, Student's t), and over repeats where there are
several. Plain Python, no tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.config import Mode, check, is_int, is_number
from ddtree.tree.budget_cost import DraftPlan

MARGIN = 0.01  # a gain below it is none
NORMAL_975 = 1.96
# Student's t at 97.5 %, for 1 to 30 degrees of freedom.
STUDENT_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One text decoded under one plan.

    Attributes:
        text: what was decoded; trials of one text under several plans are compared with each other.
        tokens: new tokens.
        seconds: that they took this request, above 0.
        rounds: verify passes; None where unknown.
        round_tokens: tokens that these committed, the bonus tokens included.
        repeat: which time this text was decoded under this plan.
    """

    text: str
    tokens: float
    seconds: float
    rounds: float | None = None
    round_tokens: float = 0
    repeat: int = 0

    def __post_init__(self) -> None:
        check(is_number(self.seconds) and self.seconds > 0, "seconds", self.seconds, "a time above 0")
        check(is_number(self.tokens) and self.tokens >= 0, "tokens", self.tokens, "0 or more")


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times one rate is another; `low` and `high` are None where one text is all there is.

    `is_predicted` says that it rests on forecasts, whose common errors the interval does not take out.
    """

    value: float
    low: float | None = None
    high: float | None = None
    is_predicted: bool = False

    @property
    def is_gain(self) -> bool:
        """Whether it is more than `MARGIN` above 1: surely, or in a forecast as foretold."""
        least = self.value if self.is_predicted else self.low
        return least is not None and least > 1 + MARGIN

    @property
    def may_be_gain(self) -> bool:
        """Whether longer measuring could show it to be more than `MARGIN` above 1."""
        return self.high is None or self.high > 1 + MARGIN

    def __str__(self) -> str:
        if self.low is None or self.high is None or self.low == self.high:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan as measured with so many requests at once.

    `in_flight` is how many there really were on average, fewer where the last ones ran by themselves.
    """

    plan: DraftPlan
    num_requests: int
    trials: tuple[Trial, ...]
    in_flight: float | None = None

    def __post_init__(self) -> None:
        _check_load(self.num_requests)
        check(len(self.trials) > 0, "trials", self.trials, "one text or more")

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second of all requests together."""
        seconds = math.fsum(trial.seconds for trial in self.trials)
        return self.num_requests * math.fsum(trial.tokens for trial in self.trials) / seconds

    @property
    def accept_length(self) -> Ratio | None:
        """Tokens committed a round, over all texts; 1 in plain decoding, None where rounds are unknown."""
        if self.plan.mode is Mode.AR:
            return Ratio(1.0, 1.0, 1.0)
        counted = [(t.text, t.round_tokens, t.rounds) for t in self.trials if t.rounds]
        tokens, rounds = math.fsum(c[1] for c in counted), math.fsum(c[2] for c in counted)
        if not tokens:
            return None
        shares: dict[str, float] = defaultdict(float)
        for text, some_tokens, some_rounds in counted:
            shares[text] += some_tokens / tokens - some_rounds / rounds
        return _interval(tokens / rounds, list(shares.values()))

    @property
    def rounds(self) -> float:
        """Rounds that were counted."""
        return math.fsum(trial.rounds or 0 for trial in self.trials)

    @property
    def round_s(self) -> float | None:
        """Seconds of a round by accept length and rate, its share of the prefills included."""
        length = self.accept_length
        rate = self.tokens_per_s
        return None if length is None or rate <= 0 else self.num_requests * length.value / rate


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan that was not measured at this load; `log_error` is the typical error of its rate's logarithm."""

    plan: DraftPlan
    num_requests: int
    length: float
    round_s: float
    log_error: float

    def __post_init__(self) -> None:
        _check_load(self.num_requests)
        for name in ("length", "round_s"):
            value = getattr(self, name)
            check(is_number(value) and value > 0, name, value, "a number above 0")

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second of all requests together."""
        return self.num_requests * self.length / self.round_s

    @property
    def accept_length(self) -> Ratio:
        """Tokens committed a round."""
        return Ratio(self.length, is_predicted=True)


Evidence = Measured | Forecast


def _check_load(num_requests: int) -> None:
    check(is_int(num_requests) and num_requests >= 1, "num_requests", num_requests, "1 or more")


def rate_ratio(one: Evidence, other: Evidence) -> Ratio | None:
    """How many times as fast one is, over the texts that both have; None where they share none."""
    if isinstance(one, Measured) and isinstance(other, Measured):
        return _paired_ratio(one, other)
    if other.tokens_per_s <= 0:
        return None
    if one == other:
        return Ratio(1.0, 1.0, 1.0, is_predicted=True)
    value = one.tokens_per_s / other.tokens_per_s
    errors = [found.log_error for found in (one, other) if isinstance(found, Forecast)]
    spread = math.exp(NORMAL_975 * math.hypot(*errors))
    return Ratio(value, value / spread, value * spread, is_predicted=True)


def _paired_ratio(one: Measured, other: Measured) -> Ratio | None:
    firsts = {(trial.text, trial.repeat): trial for trial in one.trials}
    pairs = [
        (first, second)
        for second in other.trials
        if (first := firsts.get((second.text, second.repeat))) is not None
    ]
    sums = _sums(pairs)
    if sums is None:
        return None
    shares: dict[str, float] = defaultdict(float)
    for first, second in pairs:
        parts = (first.tokens, -first.seconds, -second.tokens, second.seconds)
        shares[first.text] += math.fsum(part / total for part, total in zip(parts, sums, strict=True))
    load = one.num_requests / other.num_requests
    value = load * sums[0] * sums[3] / (sums[1] * sums[2])
    return _interval(value, list(shares.values()), _repeat_variance(pairs))


def _sums(pairs: Sequence[tuple[Trial, Trial]]) -> tuple[float, float, float, float] | None:
    """Tokens and seconds of the first and of the second trials; None where one has no tokens."""
    sums = (
        math.fsum(first.tokens for first, _ in pairs), math.fsum(first.seconds for first, _ in pairs),
        math.fsum(second.tokens for _, second in pairs), math.fsum(second.seconds for _, second in pairs),
    )  # fmt: skip
    return sums if sums[0] > 0 and sums[2] > 0 else None


def _repeat_variance(pairs: Sequence[tuple[Trial, Trial]]) -> float:
    """Of the mean log ratio, by how it differs between repeats; 0 where there is only one."""
    by_repeat: dict[int, list[tuple[Trial, Trial]]] = defaultdict(list)
    for pair in pairs:
        by_repeat[pair[0].repeat].append(pair)
    found = [sums for some in by_repeat.values() if (sums := _sums(some)) is not None]
    logs = [math.log(s[0] * s[3] / (s[1] * s[2])) for s in found]
    if len(logs) < 2:
        return 0.0
    mean = math.fsum(logs) / len(logs)
    return math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1) / len(logs)


def _interval(value: float, shares: Sequence[float], more_variance: float = 0.0) -> Ratio:
    """A ratio of sums with its 95 % interval, by what each text adds to its logarithm (delta method)."""
    count = len(shares)
    if count < 2:
        return Ratio(value)
    variance = count / (count - 1) * math.fsum(share * share for share in shares) + more_variance
    student = STUDENT_975[count - 2] if count - 2 < len(STUDENT_975) else NORMAL_975
    spread = math.exp(min(student * math.sqrt(variance), 100.0))
    return Ratio(value, value / spread, value * spread)


def short_plan(plan: DraftPlan) -> str:
    """The plan as users set it: `ar`, `chain` or `tree:64`."""
    return str(plan) if plan.mode is Mode.TREE else plan.mode.value


def plan_order(plan: DraftPlan) -> tuple[int, int]:
    """Plain decoding, the chain, then trees by budget."""
    return list(Mode).index(plan.mode), plan.node_budget
