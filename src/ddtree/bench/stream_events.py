"""Server-sent events from the pieces in which a stream came, each with the time of its last byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ddtree.bench.http_client import REFUSED, Received, RequestRefusedError, ServerError
from ddtree.errors import short_repr

DONE = "[DONE]"
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a last \r may be half of \r\n
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """The JSON object of an event, and when it was complete."""

    time_s: float
    value: dict[str, Any]


def stream_events(received: Received) -> list[Event]:
    """The objects of a stream, its `[DONE]` left out.

    Raises:
        RequestRefusedError: an event refuses the request for what it asks.
        ServerError: an event is no JSON object, or tells another error.
    """
    return [Event(time_s, _object(text)) for time_s, text in event_texts(received.pieces) if text != DONE]


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ServerError(f"the stream has an event that is no JSON: {short_repr(text)}") from None
    if not isinstance(value, dict):
        raise ServerError(f"the stream has an event that is no object: {short_repr(text)}")
    if value.get("error"):
        said = value["error"]
        message = said.get("message", said) if isinstance(said, dict) else said
        is_refused = isinstance(said, dict) and said.get("code") in REFUSED
        kind = RequestRefusedError if is_refused else ServerError
        raise kind(f"the stream ended with an error: {short_repr(message)}")
    return value


def event_texts(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """The data of each event; what stands behind the last blank line is an event too."""
    lines: list[bytes] = []
    time_s = 0.0
    for time_s, line in timed_lines(pieces):
        if line:
            lines.append(line)
            continue
        yield from _data(time_s, lines)
        lines = []
    yield from _data(time_s, lines)


def timed_lines(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Lines without their ends, each with the time of the piece that ended it."""
    rest, is_first, time_s = b"", True, 0.0
    for time_s, piece in pieces:
        *lines, rest = LINE_END.split(rest + piece)
        for line in lines:
            yield time_s, line.removeprefix(BYTE_ORDER_MARK) if is_first else line
            is_first = False
    if rest:
        yield time_s, rest.removesuffix(b"\r")


def _data(time_s: float, lines: Iterable[bytes]) -> Iterator[tuple[float, str]]:
    """The text of one event's data lines, if it has any; comments and other fields mean nothing here."""
    fields = (line.partition(b":") for line in lines)
    data = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
    if data:
        yield time_s, b"\n".join(data).decode("utf-8", "replace")
