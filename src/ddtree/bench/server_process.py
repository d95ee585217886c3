"""A server that this program starts: its log, its health, its memory and its end."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddtree.bench import server_guard
from ddtree.bench.http_client import HttpClient, ServerError
from ddtree.errors import ConfigError, short_repr

logger = logging.getLogger(__name__)

KILL_S = 10.0  # from SIGKILL to the last process gone
POLL_S, HEALTH_S = 0.25, 30.0
LOG_TAIL_BYTES = 262_144
ERROR_LINE = re.compile(
    r"\b\w*(?:Error|Exception)\b: .|\berror\b[: ]|\bout of memory\b|\bKilled\b", re.IGNORECASE
)
SIGNAL_BASE = 128


class ServerProcess:
    """A server of its own process group, and whatever it starts.

    It ends with this program, however that one ends; see `server_guard`.

    Args:
        name: for messages and the log's name.
        command: what to run.
        environment: all of its variables.
        log: its standard output and error.
        grace_s: seconds from asking it to end to ending it.

    Raises:
        ConfigError: the log cannot be written.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        grace_s: float,
    ) -> None:
        self.name, self.log, self.command, self._grace_s = name, log, tuple(command), grace_s
        guard = [sys.executable, "-I", str(server_guard.__file__), str(grace_s), *command]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log_start = log.stat().st_size if log.exists() else 0
            with log.open("ab") as file:
                self._guard = subprocess.Popen(
                    guard, env=dict(environment), stdin=subprocess.PIPE, stdout=file, stderr=file,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"the log {short_repr(str(log))} cannot be written: {error.strerror}"
            ) from error

    def wait_until_ready(self, client: HttpClient, path: str, limit_s: float) -> None:
        """Return once the server answers 200 at a path.

        Raises:
            ServerError: it ended, or was not ready in time.
        """
        end_s = time.monotonic() + limit_s
        while True:
            with suppress(ServerError):
                if client.status("GET", path, HEALTH_S) == 200:
                    return
            if not self.is_running:
                raise ServerError(f"the server ended with {self.exit_text()} while it started: {self._why()}")
            if time.monotonic() > end_s:
                raise ServerError(f"the server was not ready after {limit_s:g} s: {self._why()}")
            time.sleep(POLL_S)

    @property
    def is_running(self) -> bool:
        return self._guard.poll() is None

    def death(self) -> ServerError | None:
        """Why it ended, if it did."""
        with suppress(subprocess.TimeoutExpired):  # its connections close a moment before it has ended
            self._guard.wait(1.0)
        if self.is_running:
            return None
        return ServerError(f"the server ended with {self.exit_text()} while it worked: {self._why()}")

    def exit_text(self) -> str:
        """How it ended, for people."""
        code = self._guard.returncode
        if code is None:
            return "no exit code"
        with suppress(ValueError):
            if code > SIGNAL_BASE:
                return signal.Signals(code - SIGNAL_BASE).name
        return f"exit code {code}"

    def _why(self) -> str:
        """The last line of the log that tells an error, else the last one, and where the log is."""
        lines = [line.strip() for line in self.log_end().splitlines() if line.strip()]
        errors = [line for line in lines if ERROR_LINE.search(line)]
        last = (errors or lines or ["nothing"])[-1]
        return f"its log says {short_repr(last)}; all of it: {self.log}"

    def log_end(self) -> str:
        """The end of what this server has written."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - LOG_TAIL_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def peak_memory_bytes(self) -> int | None:
        """Largest resident memory of its processes, each since its start, added up; None without /proc."""
        peaks = [_peak_bytes(pid) for pid in server_guard.processes_below(self._guard.pid)]
        return sum(peaks) or None

    def stop(self) -> None:
        """Ask it to end, wait, and end it; does nothing the second time."""
        assert self._guard.stdin is not None
        if self._guard.stdin.closed:
            return
        self._guard.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._guard.wait(self._grace_s + KILL_S)
        finally:  # a second Ctrl-C does not wait
            self._kill()

    def _kill(self) -> None:
        """End what is left of its processes and wait until nothing is: then the memory of the GPU is free."""
        end_s = time.monotonic() + KILL_S
        while (left := server_guard.processes_below(self._guard.pid)) and time.monotonic() < end_s:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S / 10)
            self._guard.poll()
        self._guard.kill()
        self._guard.wait()


def _peak_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def free_port() -> int:
    """A TCP port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
