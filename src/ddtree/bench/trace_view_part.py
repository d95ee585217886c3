"""The part of a trace that a page can hold: its first requests, and of each the first rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddtree.config import check, is_int
from ddtree.errors import ConfigError, short_repr
from ddtree.trace.read import Trace, gather
from ddtree.trace_format import parse_line

SKIPPED_LINE = b"{}\n"  # in place of a line that is left out, so that line numbers in errors stay true


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a trace is taken.

    Attributes:
        max_requests: so many requests, the first ones.
        max_rounds: so many rounds of one request, the first ones.
        max_bytes: lines of requests and rounds of that size in all; one request with one round always.

    Raises:
        ConfigError: a limit is no whole number from 1.
    """

    max_requests: int = 1000
    max_rounds: int = 1000
    max_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_rounds", "max_bytes"):
            value = getattr(self, name)
            check(is_int(value) and value >= 1, name, value, "a whole number from 1")


class TracePart(NamedTuple):
    """The first part of a trace.

    `rounds_left` counts the rounds left out of each request that is there; `requests_left` the requests
    left out and `other_rounds_left` the rounds of those.
    """

    trace: Trace
    rounds_left: Mapping[str, int]
    requests_left: int = 0
    other_rounds_left: int = 0

    @property
    def num_rounds_left(self) -> int:
        """All rounds that were left out."""
        return sum(self.rounds_left.values()) + self.other_rounds_left


def read_part(path: Path, limits: Limits | None = None) -> TracePart:
    """The first part of a trace; what is left out is counted and takes no memory.

    Raises:
        ConfigError: the file cannot be read, or is no trace that can; see `ddtree.trace.read`.
    """
    chosen = _Chosen(limits or Limits())
    try:
        with path.open("rb") as file:
            trace = gather(chosen.lines(file), str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the trace {short_repr(str(path))} cannot be read: {reason}") from error
    left = {id: number for id, number in chosen.left.items() if id in chosen.rounds}
    return TracePart(trace, left, len(chosen.left_requests), sum(chosen.left.values()) - sum(left.values()))


class _Chosen:
    """Chooses lines as they come, and counts the others."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = 0
        self.rounds: Counter[str] = Counter()  # taken, of each request that is taken
        self.left: Counter[str] = Counter()  # rounds left out, of each request
        self.left_requests: set[str] = set()

    def lines(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            try:
                values = parse_line(line)
            except ValueError:
                yield line  # for the reader to judge
                continue
            id = values.get("id")
            takes = not isinstance(id, str) or self._takes(values.get("type"), id, len(line))
            yield line if takes else SKIPPED_LINE

    def _takes(self, kind: object, id: str, size: int) -> bool:
        if kind == "request" and id not in self.rounds and id not in self.left_requests:
            takes = not self.rounds or (len(self.rounds) < self._limits.max_requests and self._fits(size))
            if takes:
                self.rounds[id] = 0
                self._bytes += size
            else:
                self.left_requests.add(id)
            return takes
        if kind == "round" and id in self.rounds:
            return self._takes_round(id, size)
        if kind == "round" and id in self.left_requests:
            self.left[id] += 1
        return id not in self.left_requests

    def _takes_round(self, id: str, size: int) -> bool:
        taken = self.rounds[id]
        is_first = self.rounds.total() == 0
        # Once one is left out, so are those after it: a part has no gaps.
        takes = is_first or (taken < self._limits.max_rounds and not self.left[id] and self._fits(size))
        if takes:
            self.rounds[id] += 1
            self._bytes += size
        else:
            self.left[id] += 1
        return takes

    def _fits(self, size: int) -> bool:
        return self._bytes + size <= self._limits.max_bytes
