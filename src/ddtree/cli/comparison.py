"""What the demo measures: one prompt decoded in every mode, and how the modes compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddtree.config import Mode, SamplingParams
from ddtree.stats import RoundObserver

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine
    from ddtree.engine.request import Generation
    from ddtree.trace.record import TraceRecorder

WARM_UP_TOKENS = 8


class Example(NamedTuple):
    """A prompt of the demo."""

    title: str
    prompt: str


EXAMPLES = (
    Example(
        "maths",
        "A baker fills 14 trays with 12 rolls each. She sells 95 rolls in the morning and half of what "
        "is left in the afternoon. How many rolls remain in the evening? Explain step by step.",
    ),
    Example(
        "code",
        "Write a Python function that checks whether a number is prime.",
    ),
    Example("question", "Name the planets of the solar system in order, with one fact about each."),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt and what each mode made of it."""

    example: Example
    runs: Mapping[Mode, Generation]

    def first_difference(self, mode: Mode) -> int | None:
        """Index of the first token in which a mode parts from plain decoding, or None."""
        plain, other = self.runs[Mode.AR].tokens, self.runs[mode].tokens
        if plain == other:
            return None
        pairs = zip(plain, other, strict=False)
        return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))

    @property
    def is_identical(self) -> bool:
        return all(self.first_difference(mode) is None for mode in self.runs)

    def speedup(self, mode: Mode) -> float:
        """Tokens a second over those of plain decoding."""
        return ratio(self.runs[mode].stats.tokens_per_s, self.runs[Mode.AR].stats.tokens_per_s)


def compare(
    engine: Engine,
    examples: Sequence[Example],
    sampling: SamplingParams,
    node_budget: int | Literal["auto"],
    recorder: TraceRecorder | None = None,
) -> Iterator[Comparison]:
    """Decode each example plainly, as a chain and as a tree, one after the other, after a short warm-up.

    The recorder gets all but the warm-up.
    """
    for mode in Mode:
        generate(engine, examples[0], replace(sampling, max_tokens=WARM_UP_TOKENS), mode, node_budget)
    for example in examples:
        yield Comparison(
            example,
            {
                mode: generate(engine, example, sampling, mode, node_budget, recorder=recorder)
                for mode in Mode
            },
        )


def generate(
    engine: Engine,
    example: Example,
    sampling: SamplingParams,
    mode: Mode,
    node_budget: int | Literal["auto"],
    observer: RoundObserver | None = None,
    recorder: TraceRecorder | None = None,
) -> Generation:
    """Decode one example in one mode, recorded where there is a recorder."""
    from ddtree.engine.request import Request

    request = Request(engine.encode(example.prompt), sampling, mode, node_budget, observer)
    return engine.generate(request) if recorder is None else recorder.generate(engine, request)


def total_speedup(comparisons: Sequence[Comparison], mode: Mode) -> float:
    """Tokens a second of a mode over those of plain decoding, all prompts together."""
    return ratio(_tokens_per_s(comparisons, mode), _tokens_per_s(comparisons, Mode.AR))


def _tokens_per_s(comparisons: Sequence[Comparison], mode: Mode) -> float:
    stats = [comparison.runs[mode].stats for comparison in comparisons]
    # As in GenerationStats.tokens_per_s: prefill makes the first token.
    return ratio(sum(s.new_tokens - 1 for s in stats), sum(s.decode_s for s in stats))


def ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
