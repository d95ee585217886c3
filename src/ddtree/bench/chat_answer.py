"""Reads what a chat completions server answered: text, token counts, times, and rounds where it tells."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from ddtree.bench.http_client import Received, ServerError, error_text
from ddtree.bench.measure import Answer
from ddtree.bench.run_checks import MAX_ACCEPT_LENGTH
from ddtree.bench.stream_events import Event, stream_events
from ddtree.config import is_int, is_number
from ddtree.errors import short_repr

TEXT_FIELDS = ("content", "reasoning_content", "reasoning")  # of a delta or message; all are new tokens
MAX_COUNT = 1 << 24  # tokens, rounds or seconds of one answer; more is a server's mistake
CountTokens = Callable[[str], int]


@dataclass(slots=True)
class Reading:
    """What of an answer was read so far.

    Attributes:
        chunks: time, text and tokens since the beginning (None where the chunk does not tell).
    """

    chunks: list[tuple[float, str, int | None]] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    finish_s: float = 0.0
    usage: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)  # of ddtree serve
    sglext: Mapping[str, Any] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Read a chunk of a stream, or a whole answer."""
        usage = _mapping(event.value, "usage")
        self.usage = usage or self.usage
        self.summary = _mapping(event.value, "ddtree") or self.summary
        self.sglext = _mapping(event.value, "sglext") or self.sglext
        choices = event.value.get("choices")
        if not isinstance(choices, list) or not choices:
            return
        choice = choices[0]
        said = choice.get("delta", choice.get("message")) if isinstance(choice, dict) else None
        if not isinstance(said, dict):
            raise ServerError(f"the answer has a choice that cannot be read: {short_repr(choice)}")
        self._take_text(event.time_s, said, usage)
        if choice.get("finish_reason") is not None:
            self.finish_reason, self.finish_s = str(choice["finish_reason"]), event.time_s

    def _take_text(self, time_s: float, said: Mapping[str, Any], usage: Mapping[str, Any]) -> None:
        texts = [said[name] for name in TEXT_FIELDS if isinstance(said.get(name), str)]
        if isinstance(said.get("content"), str):
            self.content.append(said["content"])
        calls = said.get("tool_calls")
        text = "".join(texts) + (json.dumps(calls) if calls else "")
        if text:
            self.chunks.append((time_s, text, token_count(usage, "completion_tokens")))


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def read_answer(received: Received, count_tokens: CountTokens | None = None) -> Answer:
    """The answer to a chat request.

    Args:
        count_tokens: tokens of a text, for a server that does not count; without it each chunk is one.

    Raises:
        ServerError: the answer broke off, tells an error or cannot be read.
    """
    reading = Reading()
    events = stream_events(received) if received.is_stream else [_whole(received)]
    for event in events:
        reading.take(event)
    if reading.finish_reason is None:
        raise ServerError(f"the answer broke off after {len(reading.chunks)} chunks: no finish_reason came")
    output = _ids(reading.sglext.get("output_ids"))
    new_tokens = _new_tokens(reading, output, count_tokens)
    rounds, histogram = _rounds(reading)
    first_s = reading.chunks[0][0] if reading.chunks else reading.finish_s
    return Answer(
        tokens=output,
        text="".join(reading.content),
        prompt_tokens=token_count(reading.usage, "prompt_tokens") or 0,
        new_tokens=new_tokens,
        finish_reason=reading.finish_reason,
        begin_s=received.begin_s,
        first_s=first_s if received.is_stream else None,
        end_s=received.end_s,
        decode_s=_seconds(reading.summary.get("decode_s")),
        chunk_times=chunk_times(reading.chunks, new_tokens) if received.is_stream else (),
        rounds=rounds,
        accept_histogram=histogram,
        prompt=_ids(reading.sglext.get("input_ids")),
    )


def _whole(received: Received) -> Event:
    """The answer of a server that does not stream."""
    try:
        value = json.loads(received.body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("error") or "choices" not in value:
        raise ServerError(f"the answer cannot be read: {error_text(received.body)}")
    return Event(received.end_s, value)


def token_count(usage: Mapping[str, Any], name: str) -> int | None:
    """A count of `usage`; None where it has none.

    Raises:
        ServerError: it is no count.
    """
    value = usage.get(name)
    if value is not None and not _is_count(value):
        raise ServerError(f"the answer's usage has {name}={short_repr(value)}, which is no count")
    return value


def _new_tokens(reading: Reading, output: tuple[int, ...] | None, count_tokens: CountTokens | None) -> int:
    """As the server counts; else by ids, by a tokenizer, or a chunk each."""
    counted = token_count(reading.usage, "completion_tokens")
    if counted is not None:
        return counted
    if output is not None:
        return len(output)
    if count_tokens is not None:
        return count_tokens("".join(text for _, text, _ in reading.chunks))
    return len(reading.chunks)


def chunk_times(
    chunks: Sequence[tuple[float, str, int | None]], new_tokens: int
) -> tuple[tuple[float, int], ...]:
    """When each chunk with tokens came, and how many: as the server tells, else by its share of the text."""
    if not chunks:
        return ()
    told = [so_far for _, _, so_far in chunks if so_far is not None]
    if len(told) == len(chunks) and told == sorted(told) and told[-1] <= new_tokens:
        ends = told
    else:
        lengths = list(accumulate(len(text) for _, text, _ in chunks))
        ends = [round(new_tokens * length / lengths[-1]) for length in lengths]
    ends[-1] = new_tokens  # the end token has no text
    counts = [after - before for before, after in pairwise([0, *ends])]
    times = [time_s for time_s, _, _ in chunks]
    return tuple((time_s, count) for time_s, count in zip(times, counts, strict=True) if count > 0)


def _rounds(reading: Reading) -> tuple[int | None, dict[int, int] | None]:
    """Verify passes, and rounds by tokens committed, as far as the server tells."""
    if "rounds" in reading.summary:
        rounds = reading.summary["rounds"]
        return (rounds, None) if _is_count(rounds) else (None, None)
    details = reading.sglext.get("spec_tokens_details")
    if not isinstance(details, dict):
        return None, None
    return sglang_rounds(details)


def sglang_rounds(details: Mapping[str, Any]) -> tuple[int, dict[int, int]]:
    """Verify passes and rounds by tokens committed, of SGLang's figures of a request.

    SGLang counts drafts that were right; a round commits one token more. Of the round that ends a request,
    it counts what the limit or the end token then cut off.

    Raises:
        ServerError: they cannot be read.
    """
    rounds = details.get("spec_verify_ct", 0)
    counts = details.get("spec_correct_drafts_histogram") or []
    is_known = _is_count(rounds) and isinstance(counts, list) and len(counts) <= MAX_ACCEPT_LENGTH
    if not is_known or not all(map(_is_count, counts)):
        raise ServerError(f"SGLang's figures of a request cannot be read: {short_repr(details)}")
    return rounds, {drafts + 1: count for drafts, count in enumerate(counts) if count}


def _ids(value: Any) -> tuple[int, ...] | None:
    """Token ids of one answer, given as a list of them or within a list of choices."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return tuple(value) if isinstance(value, list) and value and all(map(is_int, value)) else None


def _is_count(value: Any) -> bool:
    return is_int(value) and 0 <= value <= MAX_COUNT


def _seconds(value: Any) -> float | None:
    """None where it cannot be a time: the client's own clock is there in its place."""
    return float(value) if is_number(value) and 0 <= value <= MAX_COUNT else None
