"""Writes the file of a benchmark run, line by line, so that a killed run goes on where it stood."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from ddtree.bench.run_format import (
    FORMAT,
    VERSION,
    Cell,
    OutputsMark,
    Run,
    RunHeader,
    cell_record,
    parse_cell,
    read_run,
    unlike,
)
from ddtree.errors import ConfigError, short_repr

BEGINNING = f'{{"format":"{FORMAT}"'.encode()
MAX_HEADER_BYTES = 1 << 24


class RunWriter:
    """Appends to a run's file, each record on disk before the next is measured.

    Args:
        path: the file; made with the header where it is not there, else gone on with.
        header: of this run.

    Raises:
        ConfigError: the file cannot be written, is no run's, or is of another run: what differs is named.
    """

    def __init__(self, path: Path, header: RunHeader) -> None:
        self._path = path
        before = read_like(path, header)
        self.run = before or Run(str(path), header)
        if before is None:
            self._append({"format": FORMAT, "version": VERSION, **asdict(header)}, mode="wb")
            return
        self._mend_end()
        grown = grown_header(before.header, header)
        if grown != before.header:
            self.run.header = grown
            self._append({"type": "header", **asdict(grown)})

    def _mend_end(self) -> None:
        """Cut a last line that broke off; end one that lacks only that."""
        data = self._path.read_bytes()
        if self.run.num_torn:
            os.truncate(self._path, data.rfind(b"\n") + 1)
            self.run.num_torn = 0
        elif not data.endswith(b"\n"):
            self._write(b"\n", "ab")

    def session(self, provenance: Mapping[str, Any], outputs: Sequence[OutputsMark] = ()) -> None:
        """Say who measures from here on, and what outputs files hold."""
        self.run.sessions.append(provenance)
        self._append({"type": "session", "provenance": provenance}, outputs)

    def engine(self, arm: str, info: Mapping[str, Any]) -> None:
        """Keep what an arm's engine says of itself."""
        self.run.engines[arm] = info
        self._append({"type": "engine", "arm": arm, "info": info})

    def cell(self, cell: Cell, outputs: Sequence[OutputsMark] = ()) -> None:
        """Keep a measured cell, and what outputs files hold with its outputs."""
        record = cell_record(cell)
        read = parse_cell(record)  # as a reader gets it; before it is written, so that it can be read
        self._append(record, outputs)
        self.run.cells[cell.key] = read

    def _append(
        self,
        record: Mapping[str, Any],
        outputs: Sequence[OutputsMark] = (),
        *,
        mode: Literal["ab", "wb"] = "ab",
    ) -> None:
        if outputs:
            record = {**record, "outputs": [asdict(mark) for mark in outputs]}
            self.run.outputs |= {mark.path: mark for mark in outputs}
        line = json.dumps(record, separators=(",", ":"), default=str)
        self._write(line.encode("ascii") + b"\n", mode)

    def _write(self, data: bytes, mode: Literal["ab", "wb"]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"the run {short_repr(str(self._path))} cannot be written: {error.strerror}; what was "
                "measured before is kept: mend it and give the same command again"
            ) from error


def read_like(path: Path, header: RunHeader) -> Run | None:
    """The run that a file holds and that a run with this header can go on with; None where there is none.

    Raises:
        ConfigError: the file is no run's, or is of another run: what differs is named.
    """
    if _is_new(path):
        return None
    run = read_run(path)
    differences = unlike(run.header, header)
    if differences:
        raise ConfigError(
            f"{short_repr(str(path))} is another run ({'; '.join(differences)}): give the same settings to "
            "go on with it, or another --output"
        )
    return run


def _is_new(path: Path) -> bool:
    """Whether there is nothing to go on with: no file, an empty one, or one of a broken first line."""
    try:
        with path.open("rb") as file:
            first = file.readline(MAX_HEADER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # reading it says why
        return False
    return not first or (first.startswith(BEGINNING) and not first.endswith(b"\n"))


def grown_header(before: RunHeader, header: RunHeader) -> RunHeader:
    """The header of a run that goes on: nothing that was measured before is lost from it."""
    settings = json.loads(json.dumps(header.settings))  # as a file gives them back
    models = {**header.models, "drafter": header.models.get("drafter") or before.models.get("drafter")}
    return replace(header, settings=settings, sets={**before.sets, **header.sets}, models=models)
