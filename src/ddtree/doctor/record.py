"""Whether the files of an installed package are those of its wheel, by the wheel's RECORD."""

from __future__ import annotations

import base64
import csv
import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

MAX_RECORD_BYTES = 64 << 20
HASHES = ("sha256", "sha384", "sha512")
# Written by Python itself, whatever the wheel holds.
COMPILED = (".pyc", ".pyo")
CACHE = "__pycache__"
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class FileState(Enum):
    """What became of a file of the wheel."""

    SAME = auto()
    CHANGED = auto()
    MISSING = auto()
    UNREADABLE = auto()
    UNCHECKED = auto()


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """A package's folder against RECORD; paths are relative to the folder that holds the package.

    Attributes:
        problem: why RECORD is of no use; the lists are empty then.
        num_checked: files whose contents were compared.
        changed: files that differ from the wheel's.
        missing: files of the wheel that are not there.
        unreadable: files of the wheel that cannot be looked at.
        extra: files that are not the wheel's.
    """

    problem: str = ""
    num_checked: int = 0
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def is_intact(self) -> bool:
        return not (self.problem or self.changed or self.missing or self.unreadable or self.extra)


def check_record(record: Path, base: Path, package: str) -> RecordCheck:
    """Hold the files of `base`/`package` against the rows of `record` about them."""
    try:
        rows = read_record(record, package)
    except (OSError, ValueError, csv.Error) as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        return RecordCheck(problem=f"{record} cannot be read: {told}")
    if not rows:
        return RecordCheck(problem=f"{record} names no file of {package}")
    states: dict[FileState, list[str]] = {state: [] for state in FileState}
    for name, expected in sorted(rows.items()):
        states[file_state(base / name, expected)].append(name)
    return RecordCheck(
        num_checked=len(states[FileState.SAME]) + len(states[FileState.CHANGED]),
        changed=tuple(states[FileState.CHANGED]),
        missing=tuple(states[FileState.MISSING]),
        unreadable=tuple(states[FileState.UNREADABLE]),
        extra=tuple(sorted(set(files_below(base / package, base)) - rows.keys())),
    )


def read_record(record: Path, package: str) -> Mapping[str, str]:
    """Path to hash, for the files of a package.

    Raises:
        OSError: it cannot be read.
        ValueError, csv.Error: it is too large or is no table of text.
    """
    if (size := record.stat().st_size) > MAX_RECORD_BYTES:
        raise ValueError(f"it has {size} bytes, which no RECORD has")
    text = record.read_bytes().decode("utf-8")
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    return {
        row[0]: row[1]
        for row in rows
        if len(row) == 3 and row[0].startswith(f"{package}/") and is_own(row[0])
    }


def is_own(name: str) -> bool:
    """Whether a row is about a file that a wheel brings, and stays below the package."""
    return not name.endswith(COMPILED) and ".." not in name.split("/")


def file_state(path: Path, expected: str) -> FileState:
    """A file against the hash that RECORD has of it; some rows have none."""
    algorithm, _, digest = expected.partition("=")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return FileState.MISSING
        if algorithm not in HASHES:
            return FileState.UNCHECKED
        return FileState.SAME if digest_of(path, algorithm) == digest.rstrip("=") else FileState.CHANGED
    except OSError as error:
        return FileState.MISSING if error.errno in NOT_THERE else FileState.UNREADABLE
    except ValueError:  # a NUL byte in the name
        return FileState.MISSING


def digest_of(path: Path, algorithm: str) -> str:
    """A file's hash as RECORD writes it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")


def files_below(folder: Path, base: Path) -> Iterator[str]:
    """Files of a folder as RECORD would name them, without what Python compiles by itself."""
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != CACHE]
        for name in names:
            if not name.endswith(COMPILED):
                yield (Path(where) / name).relative_to(base).as_posix()
