"""Finished outputs of a run, in the form that `ddtree replay` reads (docs/compare.md)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddtree.bench.file_lock import check_writable
from ddtree.bench.measure import Answer
from ddtree.bench.plan import Group
from ddtree.bench.run_format import Arm, OutputsMark
from ddtree.bench_config import EMBEDDED, SGLANG
from ddtree.config import Mode, check
from ddtree.errors import ConfigError, short_repr

UNSAFE = re.compile(r"[^\w.\-]+", re.ASCII)
MAX_SHORT_NAME = 64  # signs; a file's name may have 255 bytes
CHECKSUM_DIGITS = 8
FINISHES = ("stop", "length", "cancel", "abort")


@dataclass(slots=True)
class OutputsFile:
    """Appends the outputs of cells; of several engines a file each, since a file is of one engine.

    The run's file keeps after each cell what was in its outputs file by then, so that a run that goes on
    knows its own files and drops the outputs of a cell that it has not.

    Attributes:
        path: of the one engine, or what the names of the files are made from.
        engines: of the run.
        model: the target's name.
        run: the run's file, beside which outputs files are found again.
        num_left_out: outputs whose token ids are not known.
    """

    path: Path
    engines: Sequence[str]
    model: str
    run: Path
    num_left_out: int = field(default=0, init=False)
    _contents: dict[Path, _Contents] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for path in self.paths:
            check(path.resolve() != self.run.resolve(), "outputs", str(path), "another file than the run's")

    def check(self, marks: Mapping[str, OutputsMark]) -> None:
        """Make sure that outputs can be appended, and change nothing.

        Args:
            marks: of the run, by name.

        Raises:
            ConfigError: a file is there that is not of the run, or cannot be written.
        """
        for path in self.paths:
            self._kept(path, marks)
            check_writable(path, "outputs")

    def begin(self, marks: Mapping[str, OutputsMark]) -> list[OutputsMark]:
        """Make the files, or cut what the run does not have; returns what is in them now.

        Raises:
            ConfigError: as `check`.
        """
        for path in self.paths:
            kept = self._kept(path, marks)
            self._contents[path] = _Contents()
            self._contents[path].add(kept)
            self._write(path, b"", keep_bytes=len(kept))
        return [self._mark(path) for path in self.paths]

    def _kept(self, path: Path, marks: Mapping[str, OutputsMark]) -> bytes:
        """What of a file is of cells that the run has."""
        check(path.is_file() or not path.exists(), "outputs", str(path), "a file, not a folder or a device")
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ConfigError(
                f"the outputs {short_repr(str(path))} cannot be read: {error.strerror}; name another file"
            ) from error
        mark = marks.get(self._name(path))
        if not data:
            return b""
        check(
            mark is not None, "outputs", str(path), "a new file, or the one that the run wrote before",
            "it is there already, of something else: name another file",
        )  # fmt: skip
        assert mark is not None
        kept = data[: mark.num_bytes]
        check(
            hashlib.sha256(kept).hexdigest() == mark.sha256, "outputs", str(path), "the file as the run left "
            "it", "it was changed since: name another file",
        )  # fmt: skip
        return kept

    def _name(self, path: Path) -> str:
        """The same wherever the folder of both files is moved."""
        return os.path.relpath(path.resolve(), self.run.resolve().parent)

    def _mark(self, path: Path) -> OutputsMark:
        contents = self._contents[path]
        return OutputsMark(self._name(path), contents.num_bytes, contents.sha256.hexdigest())

    @property
    def paths(self) -> list[Path]:
        """The files of all engines."""
        return [self.path_of(engine) for engine in self.engines]

    def path_of(self, engine: str) -> Path:
        """The file of an engine, such as `outputs-sglang.jsonl`; with one engine `path` itself.

        A server's file is named by its host and port, and where two servers share those by a checksum of
        the whole URL, too.
        """
        if len(self.engines) == 1:
            return self.path
        short = _short_name(engine)
        if any(other != engine and _short_name(other) == short for other in self.engines):
            # Of the name alone, so that the order of the engines makes no difference.
            short = f"{short}-{hashlib.sha256(engine.encode()).hexdigest()[:CHECKSUM_DIGITS]}"
        return self.path.with_name(f"{self.path.stem}-{short}{self.path.suffix}")

    def add(
        self, arm: Arm, group: Group, answers: Sequence[Answer], sampling: Sequence[Mapping[str, Any]],
        dtype: str | None,
    ) -> OutputsMark:  # fmt: skip
        """Append a cell's outputs; those without token ids are counted and left out.

        Returns what is in the file then.

        Args:
            sampling: parameters of each answer's request.
            dtype: the target's number format, where it is known.

        Raises:
            ConfigError: the file cannot be written.
        """
        facts = self._facts(arm, group) | ({} if dtype is None else {"dtype": dtype})
        lines = []
        for answer, parameters in zip(answers, sampling, strict=True):
            if answer.tokens and answer.prompt:
                lines.append(_line(answer, parameters) | facts)
            else:
                self.num_left_out += 1
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        path, data = self.path_of(arm.engine), text.encode("ascii")
        self._write(path, data)
        self._contents[path].add(data)
        return self._mark(path)

    def _facts(self, arm: Arm, group: Group) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "engine": EMBEDDED if arm.engine == EMBEDDED else SGLANG,
            "model": self.model,
            "prompt_set": group.prompt_set,
            "concurrency": group.concurrency,
            "repeat": group.repeat,
        }
        if arm.mode is not None:
            facts["mode"] = arm.mode.value
        if arm.mode is Mode.TREE:
            facts["node_budget"] = arm.node_budget
        return facts

    @staticmethod
    def _write(path: Path, data: bytes, keep_bytes: int | None = None) -> None:
        """Append, on disk before the run's file says so; cut to `keep_bytes` before."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                if keep_bytes is not None:
                    file.truncate(keep_bytes)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"the outputs {short_repr(str(path))} cannot be written: {error.strerror}"
            ) from error


@dataclass(slots=True)
class _Contents:
    """What is in a file, as far as a mark tells of it."""

    num_bytes: int = 0
    sha256: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.sha256.update(data)


def _short_name(engine: str) -> str:
    """An engine in a file's name: a server by its host and port, without signs that mean something there."""
    parts = urlsplit(engine)
    short = f"{parts.hostname}-{parts.port or parts.scheme}" if parts.hostname else engine
    return UNSAFE.sub("_", short)[-MAX_SHORT_NAME:]


def _line(answer: Answer, sampling: Mapping[str, Any]) -> dict[str, Any]:
    line = {"prompt_tokens": answer.prompt, "tokens": answer.tokens, "sampling": sampling}
    return line | ({"finish_reason": answer.finish_reason} if answer.finish_reason in FINISHES else {})
