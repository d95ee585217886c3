"""What an engine gives back for a request, and the figures that come of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ddtree.bench.run_format import TEXT_SHA256, Cell, CellKey, RequestFigures

Chat = Sequence[Mapping[str, str]]
"""Messages with `role` and `content`, as the chat completions API takes them."""
GAP_PERCENTILES = (50, 90, 99)
SHA256_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine gave back for one prompt. Times are seconds of one clock.

    Attributes:
        tokens: new token ids, the end token included; None where the engine tells only text.
        new_tokens: their number; counted by the server where ids are unknown.
        first_s: when the first token came; None where the answer was not streamed.
        decode_s: from the first token to the end as the engine itself measured it, else None.
        chunk_times: when each chunk with tokens came, and how many tokens it had.
        rounds: verify passes; None where unknown.
        accept_histogram: rounds by tokens committed; None where unknown.
        stages_ms: mean milliseconds of a round by stage; None where unknown.
        prompt: token ids of the prompt as the model read it; None where unknown.
    """

    tokens: tuple[int, ...] | None
    text: str
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    begin_s: float
    first_s: float | None
    end_s: float
    decode_s: float | None = None
    chunk_times: tuple[tuple[float, int], ...] = ()
    rounds: int | None = None
    accept_histogram: Mapping[int, int] | None = None
    stages_ms: Mapping[str, float] | None = None
    prompt: tuple[int, ...] | None = None

    @property
    def total_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Observed:
    """What rounds did that were watched apart from the timed ones.

    Attributes:
        ranks: correct drafts by their rank among their siblings, from 0; empty where nothing is drafted.
        stages_ms: mean milliseconds of a round by stage; None where the engine does not tell.
    """

    ranks: Mapping[int, int]
    stages_ms: Mapping[str, float] | None = None


class BenchEngine(Protocol):
    """An engine told how to decode: one arm of a run.

    Any method may raise `DDTreeError`, which ends the cell; after one that is no `ConfigError` the arm is
    given up. `run` raises when one of its requests failed: a cell has all its answers or is none.
    """

    def info(self) -> Mapping[str, Any]:
        """What the engine says of itself, ready for JSON: versions, settings, device."""

    def run(
        self,
        prompts: Sequence[Chat],
        *,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[int],
        concurrency: int,
    ) -> tuple[float, list[Answer]]:
        """Answer all prompts, `concurrency` at a time; wall seconds and the answers in the prompts' order.

        `seeds` has one seed a prompt, for sampling.
        """

    def observe(
        self, prompts: Sequence[Chat], *, max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> Observed | None:
        """Answer prompts untimed and tell what their rounds did; None where that cannot be seen."""

    def peak_memory_bytes(self) -> int | None:
        """Largest memory since `flush`: of the device where there is one, else of the process."""

    def flush(self) -> None:
        """Begin a cell: empty prefix caches, forget the peak of memory."""

    def close(self) -> None:
        """Give back what the engine holds; does nothing the second time."""


@dataclass(frozen=True, slots=True)
class CellExtras:
    """What is known of a cell beside its answers; see `Cell`.

    Attributes:
        is_correct: by prompt; empty where no answer was checked.
    """

    is_correct: Sequence[bool | None] = ()
    observed: Observed | None = None
    peak_memory_bytes: int | None = None
    energy_j: float | None = None


def figures(key: CellKey, wall_s: float, answers: Sequence[Answer], extras: CellExtras | None = None) -> Cell:
    """The cell that these answers make."""
    extras = extras or CellExtras()
    correct = extras.is_correct or [None] * len(answers)
    observed = extras.observed
    return Cell(
        key=key,
        wall_s=wall_s,
        requests=tuple(
            request_figures(number, answer, is_correct)
            for number, (answer, is_correct) in enumerate(zip(answers, correct, strict=True))
        ),
        between_tokens_ms=between_tokens_ms(answers),
        accept_histogram=_texts(_summed(answer.accept_histogram for answer in answers)),
        rank_histogram=None if observed is None else _texts(observed.ranks),
        stages_ms=_stages_ms(answers, observed),
        peak_memory_bytes=extras.peak_memory_bytes,
        energy_j=extras.energy_j,
    )


def request_figures(number: int, answer: Answer, is_correct: bool | None = None) -> RequestFigures:
    """The figures of one request."""
    first_s, decode_s = answer.first_s, answer.decode_s
    if decode_s is None:
        decode_s = answer.total_s if first_s is None else answer.end_s - first_s
    return RequestFigures(
        prompt=number,
        prompt_tokens=answer.prompt_tokens,
        new_tokens=answer.new_tokens,
        total_s=answer.total_s,
        decode_s=decode_s,
        tokens_sha256=output_sha256(answer),
        finish_reason=answer.finish_reason,
        rounds=answer.rounds,
        first_token_s=None if first_s is None else first_s - answer.begin_s,
        is_correct=is_correct,
    )


def output_sha256(answer: Answer) -> str:
    """First digits of the checksum of the new tokens; where they are unknown `TEXT_SHA256` and the text's."""
    said = answer.text if answer.tokens is None else ",".join(map(str, answer.tokens))
    digits = hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:SHA256_DIGITS]
    return digits if answer.tokens is not None else TEXT_SHA256 + digits


def between_tokens_ms(answers: Iterable[Answer]) -> dict[str, float] | None:
    """Percentiles of the milliseconds a token had to be waited for, first tokens apart; None without any.

    The tokens of a chunk share the gap before it evenly, so that the mean is decode time over tokens.
    """
    gaps: list[float] = []
    tokens: list[int] = []
    for answer in answers:
        for (before_s, _), (now_s, count) in zip(answer.chunk_times, answer.chunk_times[1:], strict=False):
            if count > 0:
                gaps.append((now_s - before_s) * 1e3 / count)
                tokens.append(count)
    if not gaps:
        return None
    values = percentiles(np.repeat(gaps, tokens), GAP_PERCENTILES)
    return {str(percent): value for percent, value in zip(GAP_PERCENTILES, values, strict=True)}


def percentiles(values: Sequence[float] | np.ndarray[Any, Any], percents: Sequence[float]) -> list[float]:
    """Percentiles of at least one value, linear between neighbours."""
    return [float(value) for value in np.percentile(np.asarray(values, dtype=np.float64), percents)]


def _summed(histograms: Iterable[Mapping[int, int] | None]) -> Counter[int] | None:
    """One histogram of all; None unless every one is known."""
    total: Counter[int] = Counter()
    for histogram in histograms:
        if histogram is None:
            return None
        total.update(histogram)
    return total


def _texts(histogram: Mapping[int, int] | None) -> dict[str, int] | None:
    if not histogram:
        return None
    return {str(length): count for length, count in sorted(histogram.items()) if count}


def _stages_ms(answers: Sequence[Answer], observed: Observed | None) -> Mapping[str, float] | None:
    """Those of observed rounds, else the mean of the answers' by their rounds."""
    if observed is not None and observed.stages_ms:
        return observed.stages_ms
    timed = [(answer.stages_ms, answer.rounds or 0) for answer in answers if answer.stages_ms]
    rounds = sum(count for _, count in timed)
    if not rounds:
        return None
    names = dict.fromkeys(name for stages, _ in timed for name in stages)
    return {name: sum(stages.get(name, 0.0) * count for stages, count in timed) / rounds for name in names}


def first_turn(turns: Sequence[str]) -> Chat:
    """The messages of a prompt's first turn."""
    return [{"role": "user", "content": turns[0]}]
