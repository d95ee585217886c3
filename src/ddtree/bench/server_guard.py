"""Runs a server's command and ends it with the program that asked for it, however that one ends.

    python server_guard.py GRACE_S COMMAND...

Standard input is a pipe that the asking program holds open: its end, by closing or by dying, ends the server.
The server gets SIGTERM and GRACE_S seconds, then SIGKILL with all processes of its group. This file runs by
itself and imports nothing of the package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def end_group(pid: int) -> None:
    """End what is left of the process group that `pid` leads."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_when_asked(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait for the end of standard input, then end the server."""
    while os.read(0, 4096):
        pass
    server.terminate()
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        end_group(server.pid)


def main() -> int:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    # Only the pipe ends the guard: a signal to the group must not leave the server without one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_default_signals
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=end_when_asked, args=(server, grace_s), daemon=True).start()
    code = server.wait()
    end_group(server.pid)
    return code if code >= 0 else 128 - code


def _default_signals() -> None:
    """A command inherits what is ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
