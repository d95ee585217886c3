"""The trace format: what a decoder did, round by round, as JSON Lines (docs/traces.md).

The first line is the header; then come lines of requests, their rounds and their ends, those of requests
that run at once interleaved. A line that breaks off at the end of a file, as after a crash, is left out by
the reader; unknown fields and unknown types of lines are ignored, so that later versions may add some.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from ddtree.config import SamplingParams
from ddtree.errors import ConfigError, short_repr

logger = logging.getLogger(__name__)

FORMAT, VERSION = "ddtree-trace", 1
PERIOD_S = 0.05  # a record waits no longer for the thread
CLOSE_S = 10.0
MAX_PENDING = 20_000  # records; a hundred megabytes of those with trees of 64 nodes
MAX_HEADER_BYTES = 1 << 20
SAMPLED_BLOCKS, BLOCK_BYTES = 16, 1 << 16  # of a weights file, for `checkpoint_sha256`


class Detail(StrEnum):
    """How much a trace says of a round: what it committed, or its whole tree and target figures too."""

    SUMMARY = "summary"
    FULL = "full"


def described(kind: str, help_text: str, default: Any = MISSING) -> Any:
    """A field of a line: its kind of value and what it means; a field with a default may be left out."""
    return field(default=default, metadata={"kind": kind, "help": help_text})


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The first line: who decoded, with what."""

    engine: str = described("text", "`embedded` or `sglang`")
    target: Mapping[str, Any] = described("object", "`name`, and `folder_sha256` where the folder is known")
    drafter: Mapping[str, Any] | None = described("object or null", "the same of the drafter; null without")
    versions: Mapping[str, Any] = described("object", "of ddtree, Python, packages and the machine")
    device: str = described("text", "such as `cpu` or `cuda:0`")
    dtype: str = described("text", "number format of the target, such as `bfloat16`")
    settings: Mapping[str, Any] = described("object", "the engine's or the plugin's settings")
    time_utc: str = described("text", "when the trace was begun, ISO 8601")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request, before its rounds."""

    id: str = described("text", "names the request within the trace")
    prompt_tokens: tuple[int, ...] = described("ints", "token ids of the prompt")
    sampling: Mapping[str, Any] = described("object", "its `SamplingParams` by field; in SGLang also others")
    mode: str = described("text", "`ar`, `chain` or `tree`, as asked for")
    node_budget: int | str = described("int or text", "nodes of a tree, root not counted, or `auto`")
    server_id: str | None = described("text", "SGLang's own id of the request", None)


@dataclass(frozen=True, slots=True)
class TraceRound:
    """A round: what it verified and committed.

    `accept_tokens` of all rounds, after the root of the first one, are the request's tokens; the last round
    may commit some past the request's end.
    """

    id: str = described("text", "the request")
    round: int = described("int", "from 1")
    position: int = described("int", "absolute position of the root, prompt included")
    root: int = described("int", "the root's token: the last one committed before")
    mode: str = described("text", "of this round")
    node_budget: int = described("int", "of this round; 0 for `ar`")
    accept_tokens: tuple[int, ...] = described("ints", "committed: correct drafts, then the bonus token")
    accept_indices: tuple[int, ...] = described("ints", "the path's nodes, the root (0) first")
    round_ms: float = described("number", "wall time; in SGLang of the whole batch's round on the device")
    tokens: tuple[int, ...] = described("ints", "full: tokens of the tree's nodes, the root first", ())
    parents: tuple[int, ...] = described("ints", "full: parent of each node, -1 for the root", ())
    log_probs: tuple[float, ...] = described(
        "numbers", "full: the drafter's log-probability of each node, summed from the root", ()
    )
    target: tuple[tuple[float, float], ...] = described(
        "pairs",
        "full: for each emitted token the target's log-probability, and that of its best token less that of "
        "its second best (the margin), both before bias, penalties and temperature",
        (),
    )
    stages_ms: Mapping[str, Any] | None = described(
        "object",
        "full, embedded engine: milliseconds of `draft`, `build`, `verify`, `accept`, `commit`; on a CUDA "
        "device on its own clock, and with CUDA graphs of a round that is replayed as a graph a step",
        None,
    )


@dataclass(frozen=True, slots=True)
class TraceEnd:
    """A request's end."""

    id: str = described("text", "the request")
    tokens: tuple[int, ...] = described("ints", "all emitted tokens")
    finish_reason: str = described("text", "`stop`, `length`, `cancel`; in SGLang also `abort`")
    stats: Mapping[str, Any] = described("object", "totals of the request, units in their names")
    first_target: tuple[tuple[float, float], ...] = described(
        "pairs", "full: as `target` of a round, for the first token, which prefill makes", ()
    )


Record = TraceHeader | TraceRequest | TraceRound | TraceEnd
TYPES: Mapping[str, type[TraceRequest | TraceRound | TraceEnd]] = {
    "request": TraceRequest,
    "round": TraceRound,
    "end": TraceEnd,
}
TYPE_NAMES = {record_type: name for name, record_type in TYPES.items()}
FIELDS: dict[type, tuple[Field[Any], ...]] = {
    record_type: fields(record_type) for record_type in (TraceHeader, *TYPES.values())
}


# -- to lines --------------------------------------------------------------------------------------


def to_line(record: Record) -> bytes:
    """A record as one line of ASCII, its newline included; numbers that are not finite become null.

    Raises:
        ValueError: a whole number of more digits than Python writes.
    """
    start: dict[str, Any] = (
        {"format": FORMAT, "version": VERSION}
        if isinstance(record, TraceHeader)
        else {"type": TYPE_NAMES[type(record)]}
    )
    for spec in FIELDS[type(record)]:
        value = getattr(record, spec.name)
        if spec.default is MISSING or value != spec.default:
            start[spec.name] = value
    try:
        text = json.dumps(start, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        text = json.dumps(_finite(start), allow_nan=False, separators=(",", ":"), default=str)
    return text.encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, tuple | list) else value


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters as a trace holds them; token ids of `logit_bias` become text."""
    bias = {str(token): value for token, value in sampling.logit_bias.items()}
    return asdict_shallow(sampling) | {"logit_bias": bias}


def asdict_shallow(settings: Any) -> dict[str, Any]:
    """The fields of a settings class by name."""
    return {spec.name: getattr(settings, spec.name) for spec in fields(settings)}


def checkpoint_sha256(folder: Path) -> str | None:
    """A checksum that tells checkpoints apart without reading them whole; None for what is no folder.

    Of config.json, weight indices, and of each weights file its name, size and 16 evenly spread blocks of
    64 KiB.
    """
    if not (folder / "config.json").is_file():
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix == ".safetensors"
        if path.name != "config.json" and not is_weights and not path.name.endswith(".index.json"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode(errors="surrogateescape"))
        with path.open("rb") as file:
            if not is_weights or size <= SAMPLED_BLOCKS * BLOCK_BYTES:
                digest.update(file.read())
                continue
            for block in range(SAMPLED_BLOCKS):
                file.seek((size - BLOCK_BYTES) * block // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def parse_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; `ValueError` for anything else."""
    try:
        values = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it is {short_repr(values)}")
    return values


def is_trace(first_line: bytes) -> bool:
    """Whether a file that begins with this line is a trace, of whatever version."""
    try:
        return parse_line(first_line).get("format") == FORMAT
    except ValueError:
        return False


class TraceInUseError(ConfigError):
    """A trace file is being written already."""


# -- to a file -------------------------------------------------------------------------------------


class TraceWriter:
    """Writes records to a file from a thread of its own, so that decoding never waits for a disk.

    What cannot be written, as on a full disk, ends the trace with one warning, and decoding goes on. What
    was written stays readable however the process ends; at most the last `PERIOD_S` of it are missing.

    Args:
        path: the file; a trace that is there is replaced with the first record.
        poll: is called by the thread before it writes, to make records of what was not ready before; its
            argument says that it is the last call.

    Raises:
        ConfigError: the file cannot be made, or is there and is no trace.
        TraceInUseError: another writer, of this process or another one, writes it.
    """

    def __init__(self, path: Path, poll: Callable[[bool], None] | None = None) -> None:
        self._name = short_repr(str(path))
        self._file = self._open(path)
        self._poll = poll
        self._pending: deque[Record] = deque()  # the one thing both threads touch; its methods are atomic
        self._wake = threading.Event()
        self._has_begun = self._is_closing = self.has_failed = False
        self._thread = threading.Thread(target=self._run, name="ddtree-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _open(self, path: Path) -> int:
        import fcntl  # where there is none, the rest of this module works

        try:
            if path.is_file() and path.stat().st_size:
                with path.open("rb") as file:
                    if not is_trace(file.readline(MAX_HEADER_BYTES)):
                        raise ConfigError(f"the file {self._name} is there and is no trace; name another one")
            file_number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"the trace {self._name} cannot be written: {error.strerror}; name another"
            ) from error
        try:
            fcntl.flock(file_number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file_number)
            raise TraceInUseError(f"the trace {self._name} is being written; name another file") from None
        except OSError:  # a file system without locks
            logger.info("the trace %s cannot be locked against other writers", self._name)
        return file_number

    def write(self, record: Record) -> None:
        """Take a record, to be written soon; neither blocks nor raises."""
        if self.has_failed:
            return
        self._pending.append(record)
        if len(self._pending) > MAX_PENDING:
            self.fail("it cannot be written as fast as it is made")

    def flush(self) -> None:
        """Have what was taken written now; does not wait for it."""
        self._wake.set()

    def close(self) -> None:
        """Write what was taken and close the file; waits for it, at most `CLOSE_S`."""
        atexit.unregister(self.close)
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.fail("the disk does not answer")

    def _run(self) -> None:
        is_last = False
        while not (is_last or self.has_failed):
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            is_last = self._is_closing  # read before the records, so that none is left behind
            try:
                if self._poll is not None:
                    self._poll(is_last)
                self._drain()
            except Exception as error:  # whatever it is, decoding must not end by it
                self.fail(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
        os.close(self._file)

    def _drain(self) -> None:
        lines = []
        while self._pending:
            lines.append(to_line(self._pending.popleft()))
        if lines and not self._has_begun:
            self._has_begun = True
            with suppress(OSError):  # a pipe has no length
                os.ftruncate(self._file, 0)
        data = memoryview(b"".join(lines))
        while data and not self.has_failed:
            data = data[os.write(self._file, data) :]

    def fail(self, reason: str) -> None:
        """End the trace here, with one warning that says why."""
        if not self.has_failed:
            self.has_failed = True
            logger.warning("the trace %s ends here: %s; decoding goes on without", self._name, reason)
        self._pending.clear()
