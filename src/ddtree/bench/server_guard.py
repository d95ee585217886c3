"""Runs a server's command and ends it with the program that asked for it, however that one ends.

    python server_guard.py GRACE_S COMMAND...

Standard input is a pipe that the asking program holds open: its end, by closing or by dying, ends the server.
The server gets SIGTERM and GRACE_S seconds, then SIGKILL with all processes of its group; on Linux all that
it started are ended, in whatever session they are. This file runs by itself and imports nothing of the
package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

KILL_S, POLL_S = 5.0, 0.02
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


def adopt_orphans() -> None:
    """On Linux, become the parent of what a process below leaves behind."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes() -> dict[int, tuple[int, int]]:
    """Parent and session of each process that has not ended; none where there is no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            state, parent, _, session = text.rpartition(")")[2].split()[:4]
            if state != "Z":
                found[int(folder.name)] = int(parent), int(session)
    return found


def processes_below(pid: int) -> list[int]:
    """The processes that one and those of its session started, those that they started, and so on."""
    known = processes()
    below = {each for each, (_, session) in known.items() if session == pid}
    new = below | {pid}
    while new:
        new = {each for each, (parent, _) in known.items() if parent in new} - below
        below |= new
    return sorted(below - {pid})


def end_all_below() -> None:
    """End whatever this process started, and wait until nothing is left."""
    end_s = time.monotonic() + KILL_S
    while (left := processes_below(os.getpid())) and time.monotonic() < end_s:
        for each in left:
            with suppress(OSError):
                os.kill(each, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)


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
    adopt_orphans()
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
    end_all_below()
    return code if code >= 0 else 128 - code


def _default_signals() -> None:
    """A command inherits what is ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
