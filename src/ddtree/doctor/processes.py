"""Runs a program for a limited time, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import IO

MAX_OUTPUT_BYTES = 1 << 20  # that are read of each stream
MAX_PROBLEM = 300  # characters
END_LIMIT_S = 3.0  # for what was ended to be gone, and for its output to be read


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended; `code` is None where it could not be started or took too long."""

    code: int | None
    out: str = ""
    errors: str = ""
    problem: str = ""


def run_limited(command: Sequence[str], limit_s: float, environ: Mapping[str, str] = os.environ) -> Ran:
    """Run a program in a process group of its own, which is ended after `limit_s` seconds.

    Its output is read as it comes and up to a limit, so that neither endless output nor a child that outlives
    the program keeps this one waiting.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env=dict(environ), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Ran(None, problem=f"the program cannot be run: {error.strerror}")
    streams = [read_aside(stream) for stream in (process.stdout, process.stderr) if stream is not None]
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return Ran(None, problem=f"it did not end within {limit_s:g} seconds")
    finally:
        end_group(process)
    for reader, _ in streams:
        reader.join(END_LIMIT_S)
    out, errors = (bytes(data).decode("utf-8", "replace") for _, data in streams)
    return Ran(code, out, errors, ending(code, errors))


def read_aside(stream: IO[bytes]) -> tuple[Thread, bytearray]:
    """Read a stream to its end or the limit; the program's next write fails behind that."""
    data = bytearray()

    def read() -> None:
        with stream:
            while len(data) < MAX_OUTPUT_BYTES and (part := stream.read(1 << 16)):
                data.extend(part)

    reader = Thread(target=read, daemon=True)
    reader.start()
    return reader, data


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the program; one that waits for a broken driver may outlive even that."""
    with suppress(ProcessLookupError, PermissionError):  # it has ended; PermissionError on macOS
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)


def ending(code: int, errors: str) -> str:
    """What went wrong in one line: the last one on standard error, else the code or the signal."""
    if code == 0:
        return ""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if code > 0:
        return lines[-1][:MAX_PROBLEM] if lines else f"it ended with {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was ended by {name}"
