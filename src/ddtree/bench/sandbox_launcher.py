"""Runs one program shut in: a script that `ddtree.bench.sandbox` starts, never imports.

Its argument is the settings as JSON. It shuts itself in as far as the kernel allows, starts the program as
its child, kills what outlives it, and writes one JSON object to the report pipe. Standard library only: it
runs under `python -I -S`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x0002_0000, 0x0800_0000, 0x1000_0000
CLONE_NEWPID, CLONE_NEWNET = 0x2000_0000, 0x4000_0000
MS_NOSUID_NODEV, MS_MOVE, MS_REC_BIND, MS_REC_PRIVATE = 0x6, 0x2000, 0x5000, 0x4_4000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
LAST_CAPABILITY = 63
# mount_setattr has this number on every architecture; older C libraries have no function for it.
SYS_MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD, MOUNT_ATTR_RDONLY = 442, 0x8000, -100, 0x1
HIDDEN = ("/root", "/home", "/run", "/tmp", "/var/tmp")
EMPTY = b"size=64k,nr_inodes=100,mode=0755"
POLL_S = 0.002
CLEAN_UP_S = 2.0
CANNOT_START = 125

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """Why the program is not run."""


def call(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def prctl(option: int, value: int) -> None:
    call(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def unshare(flags: int) -> None:
    call(libc.unshare(flags))


def mount(source: str | None, folder: str, flags: int, options: bytes | None = None) -> None:
    """Mount, bind or move `source`; `tmpfs` is a file system in memory."""
    kind = b"tmpfs" if source == "tmpfs" else None
    from_path = os.fsencode(source) if source is not None else None
    call(libc.mount(from_path, os.fsencode(folder), kind, ctypes.c_ulong(flags), options))


def write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def own_user_namespace() -> None:
    """Rights over the namespaces below without being root; outside it we stay who we are."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    write_text("/proc/self/setgroups", "deny")
    write_text("/proc/self/uid_map", f"{NOBODY} {uid} 1")
    write_text("/proc/self/gid_map", f"{NOBODY} {gid} 1")
    with suppress(OSError):  # it could mount what it likes in a namespace of its own
        write_text("/proc/sys/user/max_user_namespaces", "0")


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def hide(folder: str, kept: list[str], stage: str) -> None:
    """Put an empty folder in place of one, with `kept` still in it; all of it or nothing."""
    mount("tmpfs", stage, MS_NOSUID_NODEV, EMPTY)
    for path in kept:
        target = stage + path[len(folder) :]
        os.makedirs(target, exist_ok=True)
        mount(path, target, MS_REC_BIND)
    mount(stage, folder, MS_MOVE)


def hide_homes(settings: dict[str, Any]) -> None:
    """Hide home and temporary folders and running services' sockets; Python and the program stay."""
    kept: list[str] = settings["kept"]
    for folder in (*HIDDEN, settings["home"]):
        nested = folder not in HIDDEN and any(within(folder, other) for other in HIDDEN)
        is_needed = any(within(folder, path) for path in kept)
        is_root = folder == "/"  # the home of users that have none
        if os.path.isdir(folder) and not (os.path.islink(folder) or is_root or nested or is_needed):
            hide(folder, [path for path in kept if within(path, folder)], settings["stage"])


def shut_files(settings: dict[str, Any]) -> None:
    """All files read-only but for a small file system in memory at `work`; nothing in /proc."""
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    call(libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_int(AT_FDCWD), b"/", ctypes.c_uint(AT_RECURSIVE),
        read_only, ctypes.c_size_t(len(read_only)),
    ))  # fmt: skip
    mount("tmpfs", "/proc", MS_NOSUID_NODEV, EMPTY)
    size = b"size=%d,nr_inodes=1000,mode=0700" % settings["limits"]["disk_bytes"]
    mount("tmpfs", settings["work"], MS_NOSUID_NODEV, size)


def own_mounts(settings: dict[str, Any]) -> list[str]:
    """The protections among `home` and `files` that the kernel grants."""
    unshare(CLONE_NEWNS)
    mount(None, "/", MS_REC_PRIVATE)
    return take([("home", lambda: hide_homes(settings)), ("files", lambda: shut_files(settings))], settings)


def take(steps: list[tuple[str, Callable[[], None]]], settings: dict[str, Any]) -> list[str]:
    taken = []
    for name, step in steps:
        if name in settings["protections"]:
            try:
                step()
            except OSError:
                continue
            taken.append(name)
    return taken


def isolate(settings: dict[str, Any]) -> list[str]:
    """Take on what the kernel grants of the wanted protections; their names."""
    if os.geteuid() != 0:
        try:
            own_user_namespace()
        except OSError:
            return []
    taken = take([
        ("network", lambda: unshare(CLONE_NEWNET)),
        ("ipc", lambda: unshare(CLONE_NEWIPC)),
        ("processes", lambda: unshare(CLONE_NEWPID)),
    ], settings)  # fmt: skip
    try:
        return [*taken, *own_mounts(settings)]
    except OSError:
        return taken


def can_be_nobody(settings: dict[str, Any]) -> bool:
    """Whether we, root, may become `nobody`, and `nobody` can read Python and the program."""
    if "user" not in settings["protections"]:
        return False
    needed = (sys.executable, os.path.dirname(os.__file__), settings["program"])
    try:
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    except OSError:
        return False
    try:
        return all(os.access(path, os.R_OK, effective_ids=True) for path in needed)
    finally:
        os.seteuid(0)
        os.setegid(0)


def limit_resources(limits: dict[str, Any]) -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        ceiling = resource.getrlimit(kind)[1]
        limit = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
        resource.setrlimit(kind, (limit, limit))


def drop_rights(*, to_nobody: bool) -> None:
    """No capability survives the program's start, and it can gain none."""
    if to_nobody:
        for capability in range(LAST_CAPABILITY + 1):
            if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
                break
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def become_program(settings: dict[str, Any], *, to_nobody: bool) -> None:
    """Turn this process into the program; does not return."""
    try:
        os.chdir(settings["work"])
        drop_rights(to_nobody=to_nobody)
        limit_resources(settings["limits"])
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execve(sys.executable, [sys.executable, "-I", "-B", settings["program"]], {})
    except BaseException as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(CANNOT_START)


def wait_for(child: int, deadline: float) -> int | None:
    """The child's exit code, negative for a signal; None where it had to be killed at the deadline."""
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def children(processes: int) -> list[int]:
    """Processes whose parent we are; `processes` is /proc, opened before it was hidden."""
    found = []
    for name in filter(str.isdigit, os.listdir(processes)):
        try:
            file = os.open(f"{name}/stat", os.O_RDONLY, dir_fd=processes)
            parent = int(os.read(file, 4096).rpartition(b")")[2].split()[1])
            os.close(file)
        except (OSError, IndexError, ValueError):
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def kill_left_behind(processes: int) -> None:
    """Kill descendants until there are none; where the program had its own process ids, there are none."""
    deadline = time.monotonic() + CLEAN_UP_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in children(processes):
            os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    is_root = os.geteuid() == 0
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    protections = isolate(settings)
    if is_root:
        if not can_be_nobody(settings):
            raise Refused(f"as root it must run as the user nobody, who cannot read {sys.executable}")
        os.chown(settings["work"], NOBODY, NOBODY)
        protections.append("user")
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        become_program(settings, to_nobody=is_root)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    code = wait_for(child, begin + settings["limits"]["wall_s"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wall_s = time.monotonic() - begin
    kill_left_behind(processes)
    return {"exit_code": code, "wall_s": wall_s, "protections": protections}


def main() -> None:
    settings = json.loads(sys.argv[1])
    os.set_inheritable(settings["report_fd"], False)
    try:
        report = run(settings)
    except (Refused, OSError) as error:
        report = {"refused": str(error)}
    os.write(settings["report_fd"], json.dumps(report).encode())


if __name__ == "__main__":
    main()
