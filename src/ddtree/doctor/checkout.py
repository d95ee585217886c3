"""The git checkout that a folder lies in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ddtree.doctor.processes import MAX_PROBLEM, Ran, run_limited

GIT_LIMIT_S = 20.0
# They would make git look at another repository than the one that it is sent to.
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY",
             "GIT_NAMESPACE", "GIT_PREFIX")  # fmt: skip
FATAL = "fatal: "


@dataclass(frozen=True, slots=True)
class Checkout:
    """State of a checkout; parts that git does not tell are None or empty, and `problem` says why.

    Attributes:
        root: the folder with .git.
        commit: the commit that is checked out.
        branch: its branch, empty for none.
        dirty: files below the looked-at folder that differ from the commit or are not in it.
        problem: why git does not tell all of this, as where it is missing or refuses.
    """

    root: str
    commit: str | None = None
    branch: str = ""
    dirty: tuple[str, ...] = ()
    problem: str = ""


def find_checkout(folder: Path) -> Checkout | None:
    """The checkout that `folder` is part of, with the state of what is below it; None outside of one."""
    root = next((parent for parent in (folder, *folder.parents) if os.path.exists(parent / ".git")), None)
    if root is None:
        return None
    head = git(root, "rev-parse", "HEAD")
    if head.code != 0:
        return Checkout(str(root), problem=told_problem(head))
    branch = git(root, "symbolic-ref", "--quiet", "--short", "HEAD")
    status = git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--", str(folder))
    return Checkout(
        str(root), head.out.strip(), branch.out.strip(), changed(status.out), told_problem(status)
    )


def git(root: Path, *arguments: str) -> Ran:
    """Run git; it runs none of the checkout's hooks and monitors, and writes nothing."""
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    inherited = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    environ = {**inherited, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return run_limited([*command, *arguments], GIT_LIMIT_S, environ)


def told_problem(ran: Ran) -> str:
    """Why git failed, empty where it did not; its advice stands behind its reason."""
    fatal = next((line for line in ran.errors.splitlines() if line.startswith(FATAL)), "")
    return fatal.removeprefix(FATAL)[:MAX_PROBLEM] if ran.code and fatal else ran.problem


def changed(status: str) -> tuple[str, ...]:
    """Paths of `git status --porcelain -z`; after a rename the old path follows in a field of its own."""
    paths, fields = [], iter(status.split("\0"))
    for entry in fields:
        if len(entry) > 3:
            paths.append(entry[3:])
            if entry[0] in "RC":
                next(fields, None)
    return tuple(paths)
