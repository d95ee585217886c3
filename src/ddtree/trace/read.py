"""Reads traces (docs/traces.md): whole, or line by line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NamedTuple

from ddtree.config import is_int
from ddtree.errors import ConfigError, short_repr
from ddtree.trace_format import (
    FIELDS,
    FORMAT,
    TYPES,
    VERSION,
    Record,
    TraceEnd,
    TraceHeader,
    TraceRequest,
    TraceRound,
    parse_line,
)


class TracedRequest(NamedTuple):
    """All that a trace says of a request; without an `end` it was still running when the trace ended."""

    request: TraceRequest
    rounds: tuple[TraceRound, ...]
    end: TraceEnd | None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The emitted tokens; of a request without an end, those of its rounds."""
        if self.end is not None:
            return self.end.tokens
        tokens: list[int] = []
        for each in self.rounds:
            tokens[each.position - len(self.request.prompt_tokens) :] = (each.root, *each.accept_tokens)
        return tuple(tokens)


class Trace(NamedTuple):
    """A trace that was read; `is_cut` says that its last line broke off."""

    header: TraceHeader
    requests: tuple[TracedRequest, ...]
    is_cut: bool


def read_trace(path: Path) -> Trace:
    """A whole trace.

    Raises:
        ConfigError: the file cannot be read, is no trace, is of an unknown version, or has a broken line
            before its last.
    """
    try:
        with path.open("rb") as file:
            return gather(file, str(path))
    except OSError as error:
        raise ConfigError(f"the trace {short_repr(str(path))} cannot be read: {error.strerror}") from error


def gather(lines: Iterable[bytes], name: str) -> Trace:
    """A trace from its lines, each with its newline; `name` is told in errors, those of `read_trace`."""
    requests: dict[str, TraceRequest] = {}
    rounds: dict[str, list[TraceRound]] = {}
    ends: dict[str, TraceEnd] = {}
    header, is_cut = None, False
    for number, record in read_records(lines, name):
        if record is None:
            is_cut = True
        elif isinstance(record, TraceHeader):
            header = record
        elif isinstance(record, TraceRequest):
            _ensure(record.id not in requests, name, number, f"a second request {record.id!r}")
            requests[record.id], rounds[record.id] = record, []
        else:
            is_running = record.id in requests and record.id not in ends
            _ensure(is_running, name, number, f"a line of {record.id!r}, which is no running request")
            if isinstance(record, TraceRound):
                rounds[record.id].append(record)
            else:
                ends[record.id] = record
    assert header is not None
    traced = (TracedRequest(requests[id], tuple(rounds[id]), ends.get(id)) for id in requests)
    return Trace(header, tuple(traced), is_cut)


def read_records(lines: Iterable[bytes], name: str) -> Iterator[tuple[int, Record | None]]:
    """Line numbers and records, the header first; None for a last line that broke off."""
    number = 0
    for number, line in enumerate(lines, 1):
        if number == 1:
            yield number, _read_header(line, name)
            continue
        try:
            values = parse_line(line)
        except ValueError as error:
            if not line.endswith(b"\n"):
                yield number, None
                return
            raise ConfigError(f"{name} line {number} is no JSON object: {error}") from None
        record_type = TYPES.get(str(values.get("type")))
        if record_type is not None:
            yield number, _read(record_type, values, name, number)
    if number == 0:
        raise ConfigError(f"{name} is empty: it is no trace")


def _read_header(line: bytes, name: str) -> TraceHeader:
    try:
        values = parse_line(line)
    except ValueError:
        values = {}
    if values.get("format") != FORMAT:
        raise ConfigError(
            f"{name} is no trace: its first line is not the header of one; traces are written by "
            "ddtree generate --trace and by the plugin's trace_file"
        )
    if values.get("version") != VERSION or not is_int(values.get("version")):
        raise ConfigError(
            f"{name} is a trace of version {short_repr(values.get('version'))}; this ddtree reads version "
            f"{VERSION}; read it with a ddtree of its own time"
        )
    record: TraceHeader = _read(TraceHeader, values, name, 1)
    return record


def _read(record_type: type[Any], values: Mapping[str, Any], name: str, number: int) -> Any:
    found = {}
    for spec in FIELDS[record_type]:
        if spec.name in values:
            value, kind = values[spec.name], spec.metadata["kind"]
            is_left_out = value is None and spec.default is None
            found[spec.name] = None if is_left_out else KINDS[kind](value)
            told = f"{spec.name}={short_repr(value)}, which is not allowed: {kind}"
            _ensure(is_left_out or found[spec.name] is not REFUSED, name, number, told)
        else:
            _ensure(spec.default is not MISSING, name, number, f"no {spec.name}")
    return record_type(**found)


def _ensure(condition: bool, name: str, number: int, told: str) -> None:
    if not condition:
        raise ConfigError(f"{name} line {number} has {told}")


REFUSED = object()


def _number(value: Any) -> Any:
    """A number; null is one that was not finite."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return REFUSED
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return REFUSED


def _items(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_items(values: Any) -> Any:
        found = tuple(read(value) for value in values) if isinstance(values, list) else (REFUSED,)
        return REFUSED if any(value is REFUSED for value in found) else found

    return read_items


def _pair(value: Any) -> Any:
    found = KINDS["numbers"](value)
    return found if found is not REFUSED and len(found) == 2 else REFUSED


def _only(*types: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, types) and not isinstance(value, bool) else REFUSED


KINDS: Mapping[str, Callable[[Any], Any]] = {
    "int": _only(int),
    "int or text": _only(int, str),
    "ints": _items(_only(int)),
    "number": _number,
    "numbers": _items(_number),
    "object": _only(dict),
    "object or null": _only(dict, type(None)),
    "pairs": _items(_pair),
    "text": _only(str),
}
