"""What a run's cells say of each arm: figures over repeats, and ratios to plain decoding and to the chain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddtree.bench.run_format import TEXT_SHA256, Arm, Cell, CellKey, Run, sorted_arms
from ddtree.config import Mode
from ddtree.errors import ConfigError, short_repr

DRAWS = 4_000
GAPS = ("50", "90", "99")
T = TypeVar("T")
Array = NDArray[np.float64]

Repeats = Mapping[int, Cell]
"""The cells of one arm at one setting, by repeat."""


class Spread(NamedTuple):
    """Median, least and greatest over repeats."""

    median: float
    low: float
    high: float


class Ratio(NamedTuple):
    """Tokens/s over another arm's: the median over repeats, and its 95 % interval where there is one."""

    value: float
    low: float | None
    high: float | None


class Share(NamedTuple):
    """How many of how many."""

    found: int
    total: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What arms are compared at."""

    prompt_set: str
    temperature: float
    concurrency: int


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm at one setting, over its repeats; None where it was not measured.

    Attributes:
        run: name of the run; empty where there is one only.
        num_repeats, num_requests: how much was measured; requests over all repeats.
        tokens_per_s: new tokens of all requests over wall time, prefill included.
        decode_tokens_per_s: of one request, without prefill; median over repeats.
        to_plain, to_chain: times the speed of the same engine's `ar` and `chain`.
        accept_length: tokens committed a round, over all repeats.
        num_rounds: of a repeat, median.
        first_token_ms: median over requests of the time to the first token.
        between_tokens_ms: percentiles ("50", "90", "99") of gaps; medians over repeats.
        accuracy: correct answers of those checked.
        peak_memory_bytes: the largest of the repeats.
        joules_a_token: of new tokens; median over repeats.
        equal_to_plain: requests with the tokens that `ar` gave in the same repeat.
        accept_histogram: rounds by tokens committed; rank_histogram: correct drafts by rank.
        stages_ms: mean milliseconds of a round by stage; means over repeats.
    """

    run: str
    arm: Arm
    setting: Setting
    num_repeats: int
    num_requests: int
    tokens_per_s: Spread | None
    decode_tokens_per_s: float | None
    to_plain: Ratio | None
    to_chain: Ratio | None
    accept_length: float | None
    num_rounds: float | None
    first_token_ms: float | None
    between_tokens_ms: Mapping[str, float]
    accuracy: Share | None
    peak_memory_bytes: int | None
    joules_a_token: float | None
    equal_to_plain: Share | None
    accept_histogram: Mapping[int, int]
    rank_histogram: Mapping[int, int]
    stages_ms: Mapping[str, float]

    @property
    def engine(self) -> str:
        """Run and engine."""
        return f"{self.run} {self.arm.engine}".strip()

    @property
    def label(self) -> str:
        """Run and arm."""
        return f"{self.run} {self.arm}".strip()

    def to_json(self) -> dict[str, Any]:
        """Every figure, with names that carry the units."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("tokens_per_s", "to_plain", "to_chain", "accuracy", "equal_to_plain"):
            values[name] = values[name] and values[name]._asdict()
        setting = values.pop("setting")
        where = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
        return {**where, **values, "arm": str(self.arm)}


def summarise(run: Run, name: str = "", plain: str | None = None) -> list[ArmFigures]:
    """Figures of all arms: settings in the order of the run, in each the arms by engine, mode and budget.

    Args:
        run: as read.
        name: what to call it among several.
        plain: arm that engines without an `ar` arm are compared with.

    Raises:
        ConfigError: a cell's arm or figures are none, or `plain` is no arm of the run.
    """
    settings: dict[Setting, dict[str, dict[int, Cell]]] = {}
    for key, cell in run.cells.items():
        arms = settings.setdefault(setting_of(key), {})
        arms.setdefault(key.arm, {})[key.repeat] = cell
    _check_arms(run, plain)
    rows = []
    for setting, arms in settings.items():
        for arm in sorted_arms(arms):
            try:
                rows.append(_figures(name, Arm.parse(arm), setting, arms, plain))
            except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{short_repr(run.source)} has a cell of arm {short_repr(arm)} with figures that are "
                    f"none: {error!r}"
                ) from error
    return rows


def setting_of(key: CellKey) -> Setting:
    return Setting(key.prompt_set, key.temperature, key.concurrency)


def _check_arms(run: Run, plain: str | None) -> None:
    names = sorted({key.arm for key in run.cells})
    for name in names:
        try:
            Arm.parse(name)
        except ConfigError as error:
            raise ConfigError(
                f"{short_repr(run.source)} has a cell of arm {short_repr(name)}: {error}"
            ) from error
    if plain is not None and plain not in names:
        raise ConfigError(
            f"plain={short_repr(plain)} is not allowed: an arm of {short_repr(run.source)}, which has "
            f"{', '.join(names) or 'none'}"
        )


def _figures(
    name: str, arm: Arm, setting: Setting, arms: Mapping[str, Repeats], plain: str | None
) -> ArmFigures:
    ours = arms[str(arm)]
    cells = list(ours.values())
    requests = [request for cell in cells for request in cell.requests]
    ar = arms.get(f"{arm.engine} {Mode.AR}") or arms.get(plain or "", {})
    gaps = {percentile: median_of(cells, partial(_gap, percentile)) for percentile in GAPS}
    first_token_s = median_of(requests, lambda request: request.first_token_s)
    memory = [cell.peak_memory_bytes for cell in cells if cell.peak_memory_bytes is not None]
    return ArmFigures(
        run=name,
        arm=arm,
        setting=setting,
        num_repeats=len(cells),
        num_requests=len(requests),
        tokens_per_s=_spread([cell.tokens_per_s for cell in cells]),
        decode_tokens_per_s=median_of(cells, lambda cell: cell.decode_tokens_per_s),
        to_plain=speed_ratio(ours, ar),
        to_chain=speed_ratio(ours, arms.get(f"{arm.engine} {Mode.CHAIN}", {})),
        accept_length=_accept_length(cells),
        num_rounds=median_of(cells, _rounds),
        first_token_ms=None if first_token_s is None else first_token_s * 1e3,
        between_tokens_ms={p: gap for p, gap in gaps.items() if gap is not None},
        accuracy=_share([request.is_correct for request in requests]),
        peak_memory_bytes=max(memory, default=None),
        joules_a_token=median_of(cells, _joules_a_token),
        equal_to_plain=_equal_outputs(ours, ar),
        accept_histogram=_pooled(cell.accept_histogram for cell in cells),
        rank_histogram=_pooled(cell.rank_histogram for cell in cells),
        stages_ms=_mean_stages(cells),
    )


def median_of(items: Iterable[T], figure: Callable[[T], float | None]) -> float | None:
    """The median of a figure over the items that have it."""
    known = [value for item in items if (value := figure(item)) is not None and math.isfinite(value)]
    return median(known) if known else None


def _spread(values: Sequence[float]) -> Spread | None:
    known = [value for value in values if math.isfinite(value)]
    return Spread(median(known), min(known), max(known)) if known else None


def _share(checks: Sequence[bool | None]) -> Share | None:
    known = [check for check in checks if check is not None]
    return Share(sum(known), len(known)) if known else None


def _rounds(cell: Cell) -> float | None:
    """Verify passes of a cell; None where no request tells."""
    if cell.accept_histogram:
        return sum(cell.accept_histogram.values())
    known = [request.rounds for request in cell.requests if request.rounds is not None]
    return sum(known) if known else None


def _gap(percentile: str, cell: Cell) -> float | None:
    return (cell.between_tokens_ms or {}).get(percentile)


def _joules_a_token(cell: Cell) -> float | None:
    return cell.energy_j / cell.new_tokens if cell.energy_j is not None and cell.new_tokens else None


def _accept_length(cells: Sequence[Cell]) -> float | None:
    """Pooled over cells, each weighted by its rounds."""
    known = [(length, rounds) for c in cells if (length := c.accept_length) and (rounds := _rounds(c))]
    total = sum(rounds for _, rounds in known)
    return sum(length * rounds for length, rounds in known) / total if total else None


def _pooled(histograms: Iterable[Mapping[str, int] | None]) -> Mapping[int, int]:
    counts: Counter[int] = Counter()
    for histogram in histograms:
        counts.update({int(value): count for value, count in (histogram or {}).items()})
    return dict(sorted(counts.items()))


def _mean_stages(cells: Sequence[Cell]) -> Mapping[str, float]:
    known = [cell.stages_ms for cell in cells if cell.stages_ms]
    names = dict.fromkeys(name for stages in known for name in stages)
    return {name: sum(stages.get(name, 0.0) for stages in known) / len(known) for name in names}


def _equal_outputs(ours: Repeats, plain: Repeats) -> Share | None:
    equal = []
    for repeat in ours.keys() & plain.keys():
        outputs = {request.prompt: request.tokens_sha256 for request in plain[repeat].requests}
        pairs = [(r.tokens_sha256, outputs[r.prompt]) for r in ours[repeat].requests if r.prompt in outputs]
        equal += [one == other for one, other in pairs if _is_text(one) == _is_text(other)]
    return _share(equal)


def _is_text(sha256: str) -> bool:
    return sha256.startswith(TEXT_SHA256)


# -- ratios ----------------------------------------------------------------------------------------


def speed_ratio(ours: Repeats, theirs: Repeats) -> Ratio | None:
    """Tokens/s over another arm's, repeat by repeat; None where no repeat has both on the same prompts.

    The interval is a bootstrap over prompts, drawn together for both arms: how far the ratio of tokens over
    summed request times swings, around the ratio of tokens/s. At concurrency 1 the two ratios are one.
    """
    shared = [
        repeat
        for repeat in sorted(ours.keys() & theirs.keys())
        if _prompts(ours[repeat]) == _prompts(theirs[repeat]) and theirs[repeat].new_tokens
    ]
    ratios = [ours[repeat].tokens_per_s / theirs[repeat].tokens_per_s for repeat in shared]
    if not ratios or not all(map(math.isfinite, ratios)):
        return None
    value = median(ratios)
    swing = ratio_swing(_by_prompt(ours, shared), _by_prompt(theirs, shared))
    return Ratio(value, value * swing[0], value * swing[1]) if swing else Ratio(value, None, None)


def _prompts(cell: Cell) -> list[int]:
    return sorted(request.prompt for request in cell.requests)


def _by_prompt(cells: Repeats, repeats: Sequence[int]) -> list[tuple[float, float]]:
    """New tokens and seconds of each prompt, over repeats; prompts in order."""
    sums: dict[int, tuple[float, float]] = {}
    for request in (request for repeat in repeats for request in cells[repeat].requests):
        tokens, seconds = sums.get(request.prompt, (0.0, 0.0))
        sums[request.prompt] = tokens + request.new_tokens, seconds + request.total_s
    return [sums[prompt] for prompt in sorted(sums)]


def ratio_swing(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]], seed: int = 0
) -> tuple[float, float] | None:
    """95 % bootstrap interval of a ratio of pooled speeds, over the ratio itself.

    Args:
        ours, theirs: tokens and seconds a prompt, of the same prompts in the same order.
        seed: of the draws.

    Returns:
        Its ends, such as (0.95, 1.06); None with fewer than two prompts or without tokens.
    """
    if len(ours) < 2:
        return None
    counts = _drawn_counts(len(ours), seed)
    with np.errstate(all="ignore"):
        drawn = [
            (counts @ values[:, 0]) / (counts @ values[:, 1]) for values in map(np.array, (ours, theirs))
        ]
        whole = np.sum(ours, axis=0), np.sum(theirs, axis=0)
        ratio = (whole[0][0] / whole[0][1]) / (whole[1][0] / whole[1][1])
        low, high = np.quantile(drawn[0] / drawn[1] / ratio, (0.025, 0.975))
    # The whole is no draw, so with few prompts all draws may lie on one side of it.
    return (min(float(low), 1.0), max(float(high), 1.0)) if math.isfinite(low + high) else None


@lru_cache(maxsize=4)
def _drawn_counts(num_prompts: int, seed: int) -> Array:
    """How often each draw took each prompt: [DRAWS, prompts]."""
    # numpy keeps this generator's stream the same in all releases: pages made from a run do not change.
    generator = np.random.RandomState(seed)
    return generator.multinomial(num_prompts, [1 / num_prompts] * num_prompts, size=DRAWS).astype(float)
