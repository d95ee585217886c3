"""Runs Python that a model wrote, with limits and as little access as the kernel lets us take away.

What it keeps from harm and what not: docs/datasets.md.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from ddtree.config import check, is_int, is_number
from ddtree.errors import DDTreeError

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
OUTPUT_BYTES = 65_536
CHUNK_BYTES = 65_536
CLEAN_UP_S = 5.0
# What the launcher exits with in place of a program that it could not start.
CANNOT_START = 125


class Protection(StrEnum):
    """What is taken away from a program beyond limits on what it uses."""

    NETWORK = "network"  # no network, the machine's own included
    PROCESSES = "processes"  # sees and signals no process but its own; none outlives it
    IPC = "ipc"  # no shared memory or message queues of others
    HOME = "home"  # home and temporary folders and services' sockets are hidden
    FILES = "files"  # all files read-only but for its own folder, which is in memory; nothing in /proc
    USER = "user"  # runs as the user nobody (only where we are root)


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The most that a program may use: seconds, bytes and counts.

    Attributes:
        wall_s: from start to end; then it is killed with all that it started.
        cpu_s: of one process, in whole seconds.
        memory_bytes: address space of one process.
        processes: processes and threads of its user at once.
        file_bytes: of one file.
        disk_bytes: of its folder, where `Protection.FILES` is on.
    """

    wall_s: float = 15.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 8
    open_files: int = 64
    file_bytes: int = 1 << 20
    disk_bytes: int = 1 << 24

    def __post_init__(self) -> None:
        check(is_number(self.wall_s) and 0 < self.wall_s <= 3600, "wall_s", self.wall_s, "above 0, to 3600")
        for name in ("cpu_s", "memory_bytes", "processes", "open_files", "file_bytes", "disk_bytes"):
            value = getattr(self, name)
            check(is_int(value) and 1 <= value < 1 << 62, name, value, "1 or more")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended.

    Attributes:
        exit_code: negative for the signal that ended it; None where it was killed at `wall_s`.
        output: the end of what it wrote, both streams, at most `OUTPUT_BYTES`.
        protections: those that were on; limits and an empty environment always are.
    """

    exit_code: int | None
    output: str
    wall_s: float
    protections: frozenset[Protection]


class SandboxError(DDTreeError):
    """The sandbox cannot run programs on this machine."""


def run_python(
    source: str, limits: SandboxLimits | None = None, protections: Iterable[Protection] = Protection
) -> SandboxResult:
    """Run a program in a process of its own, with `protections` as far as the kernel grants them.

    It runs under the interpreter without the packages of a virtual environment.

    Raises:
        SandboxError: not on Linux, or Python cannot be started shut in.
    """
    if sys.platform != "linux":
        raise SandboxError(f"programs are run on Linux only, not on {sys.platform}; do without running code")
    limits = limits or SandboxLimits()
    with tempfile.TemporaryDirectory(prefix="ddtree-sandbox-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        for part in ("work", "stage"):
            (folder / part).mkdir(mode=0o700)
        (folder / "program.py").write_bytes(source.encode("utf-8", "replace"))
        settings = _settings(folder, limits, protections)
        return _launch(settings, limits.wall_s + CLEAN_UP_S)


def missing_protections() -> list[Protection]:
    """Those that this machine does not grant; `USER` is not missing where we are not root.

    Raises:
        SandboxError: not on Linux, or Python cannot be started shut in.
    """
    granted = run_python("").protections | (set() if os.geteuid() == 0 else {Protection.USER})
    return [protection for protection in Protection if protection not in granted]


def _settings(folder: Path, limits: SandboxLimits, protections: Iterable[Protection]) -> dict[str, Any]:
    python = os.path.realpath(sys.executable)
    kept = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix, folder)}
    return {
        "python": python,
        "program": str(folder / "program.py"),
        "work": str(folder / "work"),
        "stage": str(folder / "stage"),
        "home": os.path.realpath(Path.home()),
        "kept": sorted(kept | {os.path.dirname(python)}),
        "limits": asdict(limits),
        "protections": list(protections),
    }


def _launch(settings: dict[str, Any], timeout_s: float) -> SandboxResult:
    begin = time.monotonic()
    reading_end, writing_end = os.pipe()
    with open(reading_end, "rb", buffering=0) as report_file:
        try:
            launcher = _start(settings, writing_end)
        finally:
            os.close(writing_end)
        assert launcher.stdout is not None
        with launcher.stdout as output_file:
            try:
                report, output = _collect(report_file, output_file, begin + timeout_s)
            except BaseException:
                launcher.terminate()
                raise
            finally:
                code = _stop(launcher)
    text = output.decode("utf-8", "replace")
    if code < 0:  # a program that could reach the launcher has killed it
        return SandboxResult(None, text, time.monotonic() - begin, frozenset())
    return _result(report, text)


def _start(settings: dict[str, Any], report_fd: int) -> subprocess.Popen[bytes]:
    python = settings["python"]
    argument = json.dumps(settings | {"report_fd": report_fd})
    try:
        return subprocess.Popen(
            [python, "-I", "-S", "-B", str(LAUNCHER), argument],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={}, cwd="/", pass_fds=(report_fd,), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SandboxError(f"cannot start {python}: {error.strerror}; do without running code") from None


def _collect(report_file: IO[bytes], output_file: IO[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Read both pipes until the launcher has closed its report; the output may stay open longer."""
    report = output = b""
    os.set_blocking(output_file.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(report_file, selectors.EVENT_READ)
        selector.register(output_file, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = {key.fileobj for key, _ in selector.select(left_s)}
            if output_file in ready:
                chunk = os.read(output_file.fileno(), CHUNK_BYTES)
                output = (output + chunk)[-OUTPUT_BYTES:]
                if not chunk:
                    selector.unregister(output_file)
            elif report_file in ready:
                chunk = os.read(report_file.fileno(), CHUNK_BYTES)
                report += chunk
                if not chunk:
                    break
    return report, output


def _stop(launcher: subprocess.Popen[bytes]) -> int:
    """The launcher's exit code, negative where it was killed; then what it started is killed too."""
    try:
        code = launcher.wait(CLEAN_UP_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        code = launcher.wait()
    if code < 0:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    return code


def _result(report: bytes, output: str) -> SandboxResult:
    fields = json.loads(report or b"{}")
    code = fields.get("exit_code", CANNOT_START)
    if code == CANNOT_START:
        reason = fields.get("refused") or output.strip().rpartition("\n")[2][-300:]
        raise SandboxError(f"the sandbox cannot run Python here: {reason}; do without running code")
    return SandboxResult(code, output, fields["wall_s"], frozenset(map(Protection, fields["protections"])))
