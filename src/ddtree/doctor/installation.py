"""Findings on the SGLang that would be imported, the others on the path, and the plugin's own entry point."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ddtree.doctor.copies import PACKAGE, Copy, Kind, SearchPath, entry_points_of, find_copies
from ddtree.doctor.record import RecordCheck, check_record
from ddtree.doctor.report import Finding, Level, Section
from ddtree.sglang_plugin.contract import FIRST_TESTED, LAST_TESTED

GROUP, ENTRY_POINT = "sglang.srt.plugins", "ddtree"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"
INSTALL = f"pip install sglang=={LAST_TESTED}"
REINSTALL = f"pip install --force-reinstall --no-deps {PACKAGE}"


def installation_section(
    search: SearchPath, environ: Mapping[str, str], *, is_elsewhere: bool = False
) -> tuple[Section, Copy | None]:
    """The findings, and the copy to look into: the one that wins, if it is SGLang at all.

    With `is_elsewhere` the server would run on another machine, and needs no SGLang here.
    """
    copies = find_copies(search)
    found = [*winner_findings(copies, search, is_elsewhere=is_elsewhere), *other_findings(copies)]
    first = copies[0] if copies else None
    check = None
    if first is not None and first.record is not None:
        check = check_record(first.record, first.folder.parent, PACKAGE)
        found += record_findings(first, check)
    found.append(plugin_finding(search, environ))
    data = {"copies": [copy.to_json() for copy in copies], "record": check and record_json(check)}
    section = Section("installation", "The SGLang that would be imported", tuple(found), data)
    return section, first if first is not None and first.is_importable else None


def winner_findings(copies: Sequence[Copy], search: SearchPath, *, is_elsewhere: bool) -> list[Finding]:
    """What is imported, and what is odd about it."""
    if not copies:
        return [missing_finding(is_elsewhere=is_elsewhere)]
    first = copies[0]
    if not first.is_importable:
        return [trap_finding(first, copies)]
    found = [Finding("installation.winner", Level.OK, told_copy(first)), *version_findings(first)]
    if first.kind in (Kind.SOURCE, Kind.EDITABLE, Kind.FOLDER):
        found += source_findings(first)
    if search.is_only_cwd(first.found_by):
        found.append(cwd_finding(first, copies[1:]))
    return found


def missing_finding(*, is_elsewhere: bool) -> Finding:
    name, told = "installation.missing", "SGLang is not installed in this Python"
    if is_elsewhere:
        return Finding(
            name, Level.WARN, told, why="the machine planned for has its own, which was not looked at",
            todo="run ddtree doctor there, with SGLang's own Python",
        )  # fmt: skip
    return Finding(
        name, Level.ERROR, told, why="DDTREE is a plugin of it",
        todo=f"{INSTALL}, or run the doctor with SGLang's own Python",
    )  # fmt: skip


def told_copy(copy: Copy) -> str:
    """A copy in a few words: version, folder, kind, and commit."""
    git = copy.checkout
    commit = f", commit {git.commit[:10]}" if git is not None and git.commit else ""
    branch = f" of {git.branch}" if git is not None and commit and git.branch else ""
    link = f", a link to {os.path.realpath(copy.folder)}" if copy.folder.is_symlink() else ""
    return f"SGLang {copy.told_version} in {copy.folder}{link} ({copy.kind}{commit}{branch})"


def trap_finding(first: Copy, copies: Sequence[Copy]) -> Finding:
    """Python finds something by the name of SGLang that is not SGLang."""
    below = first.folder / "python" / PACKAGE
    others = [told_copy(copy) for copy in copies[1:] if copy.is_importable]
    hides = f"; it hides {'; '.join(others)}" if others else ""
    if first.kind is Kind.NAMESPACE:
        is_open = os.access(first.folder, os.R_OK | os.X_OK)
        lacks = "has no __init__.py" if is_open else "cannot be read by this user"
        is_checkout = os.path.isfile(below / "__init__.py")
        checkout = f": it is a checkout, whose package is {below}" if is_checkout else ""
        return Finding(
            "installation.namespace", Level.ERROR,
            f"the folder {first.folder} {lacks}, and Python takes it for a package of that name"
            f"{checkout}{hides}",
            why="import sglang gives an empty package, and whatever is imported from it is not found",
            todo=f"start the server from another folder, take {first.found_by} off PYTHONPATH, or rename it",
        )  # fmt: skip
    return Finding(
        f"installation.{'module' if first.kind is Kind.MODULE else 'archive'}", Level.ERROR,
        f"import sglang takes {first.folder}, {with_article(first.kind)}{hides}",
        why="a server cannot be started from it",
        todo=f"take it off the path, and {INSTALL}",
    )  # fmt: skip


def version_findings(copy: Copy) -> list[Finding]:
    found = []
    if copy.version and copy.installed_version and copy.version != copy.installed_version:
        found.append(Finding(
            "installation.version", Level.WARN,
            f"its files say {copy.version}, its distribution says {copy.installed_version}",
            why="pip, and what asks it, goes by the second; the plugin goes by the files",
            todo=f"pip install --force-reinstall {PACKAGE}=={LAST_TESTED}",
        ))  # fmt: skip
    if copy.num_distributions > 1:
        found.append(Finding(
            "installation.distributions", Level.WARN,
            f"{copy.num_distributions} distributions named {PACKAGE} lie in {copy.folder.parent}",
            why="an upgrade was left half done, and files of both may be there",
            todo=f"pip uninstall {PACKAGE} until none is left, then {INSTALL}",
        ))  # fmt: skip
    return found


def source_findings(copy: Copy) -> list[Finding]:
    """What wins is no release as it was published."""
    found = [Finding(
        "installation.source", Level.WARN, f"it is no installed release but {with_article(copy.kind)}",
        why=f"DDTREE is tested against the releases {FIRST_TESTED} to {LAST_TESTED}; a tree between two of "
        "them can have either's code, whatever version it says",
        todo=f"for serving, take its folder off PYTHONPATH or pip uninstall {PACKAGE}, then {INSTALL}",
    )]  # fmt: skip
    git = copy.checkout
    if git is not None and git.problem:
        found.append(Finding(
            "installation.git", Level.WARN, f"git does not tell all of its state: {git.problem}",
            why=f"it lies in the checkout {git.root}, and local changes there would not show",
            todo="run git status there, as the user who owns it",
        ))  # fmt: skip
    if git is not None and git.dirty:
        names = git.dirty
        found.append(Finding(
            "installation.dirty", Level.WARN,
            f"{files(len(names), 'differs', 'differ')} from the commit there",
            why="faults of local changes look like faults of SGLang or of DDTREE",
            todo="commit them or put them away with git stash",
            names=names,
        ))  # fmt: skip
    return found


def cwd_finding(first: Copy, others: Sequence[Copy]) -> Finding:
    rest = [copy for copy in others if copy.is_importable]
    other = told_copy(rest[0]) if rest else "none"
    return Finding(
        "installation.cwd",
        Level.WARN,
        "it is found only because it lies in the working directory",
        why=f"python -m sglang.launch_server takes it when started here; sglang serve takes: {other}",
        todo="start the server from another folder",
    )


def other_findings(copies: Sequence[Copy]) -> list[Finding]:
    """Copies that are hidden by the first; where that is a trap, its finding names them."""
    if not copies or not copies[0].is_importable:
        return []
    return [other_finding(copy) for copy in copies[1:]]


def other_finding(copy: Copy) -> Finding:
    if copy.kind is Kind.NAMESPACE:
        told = f"the folder {copy.folder} has no __init__.py, so that Python goes on past it"
        return Finding("installation.namespace", Level.OK, told)
    return Finding(
        "installation.other", Level.WARN, f"{told_copy(copy)} is hidden",
        why="another folder, user or PYTHONPATH makes it the one that runs",
        todo="keep one copy: pip uninstall it, or take its folder off the path",
    )  # fmt: skip


def record_findings(copy: Copy, check: RecordCheck) -> list[Finding]:
    """Whether site-packages was patched."""
    if check.problem:
        return [Finding(
            "installation.record", Level.WARN,
            f"whether its files were changed is not known: {check.problem}",
            why="a patched file may be all that is wrong", todo=f"{REINSTALL}=={copy.installed_version}",
        )]  # fmt: skip
    if check.is_intact:
        told = f"its {check.num_checked} files are those of the wheel"
        return [Finding("installation.record", Level.OK, told)]
    found = []
    reinstall = f"{REINSTALL}=={copy.installed_version} puts the wheel's files back"
    if check.changed:
        found.append(Finding(
            "installation.changed", Level.WARN,
            f"{files(len(check.changed), 'differs', 'differ')} from the wheel's",
            why="this is no longer the release that its version names: what others report of it, and what "
            "DDTREE was tested with, need not hold",
            todo=f"keep what you need of the changes elsewhere; {reinstall}",
            names=check.changed,
        ))  # fmt: skip
    if check.missing:
        found.append(Finding(
            "installation.absent", Level.ERROR,
            f"{files(len(check.missing), 'is', 'are')} missing that the wheel has",
            why="the installation is incomplete", todo=reinstall, names=check.missing,
        ))  # fmt: skip
    if check.unreadable:
        found.append(Finding(
            "installation.unreadable", Level.ERROR,
            f"{files(len(check.unreadable), 'cannot', 'cannot')} be read by this user",
            why="a server that this user starts cannot read it either",
            todo="run this as the user of the server, or give the files their permissions back",
            names=check.unreadable,
        ))  # fmt: skip
    if check.extra:
        found.append(Finding(
            "installation.extra", Level.WARN, f"{files(len(check.extra), 'is', 'are')} not of the wheel",
            why="pip neither updates nor removes them, so that they outlive the next upgrade",
            todo="move them out of site-packages",
            names=check.extra,
        ))  # fmt: skip
    return found


def files(count: int, singular: str, plural: str) -> str:
    return f"1 file {singular}" if count == 1 else f"{count} files {plural}"


def with_article(kind: Kind) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def record_json(check: RecordCheck) -> dict[str, object]:
    return {
        "problem": check.problem,
        "checked": check.num_checked,
        "changed": list(check.changed),
        "missing": list(check.missing),
        "unreadable": list(check.unreadable),
        "extra": list(check.extra),
    }


def plugin_finding(search: SearchPath, environ: Mapping[str, str]) -> Finding:
    """Whether SGLang would find the plugin."""
    name = "installation.plugin"
    if ENTRY_POINT not in entry_points_of(search, GROUP):
        return Finding(
            name, Level.ERROR, "SGLang will not find the plugin: no distribution here has its entry point",
            why="SGLang finds plugins by the metadata of installed distributions, not by importable folders",
            todo="pip install sglang-ddtree in the environment that has SGLang, or pip install . in a clone",
        )  # fmt: skip
    chosen = environ.get(PLUGINS_VARIABLE)
    if chosen and ENTRY_POINT not in [part.strip() for part in chosen.split(",")]:
        return Finding(
            name, Level.ERROR, f"{PLUGINS_VARIABLE}={chosen!r} leaves the plugin out",
            why="SGLang then loads only the plugins that it names",
            todo=f"add {ENTRY_POINT} to it, or unset it",
        )  # fmt: skip
    return Finding(name, Level.OK, f"the plugin's entry point {ENTRY_POINT} is there for SGLang to find")
