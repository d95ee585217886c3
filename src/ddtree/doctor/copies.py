"""Which SGLang Python would import, and which others lie on its path; none of them is imported."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ddtree.doctor.checkout import Checkout, find_checkout

PACKAGE = "sglang"
VERSION_FILES = ("_version.py", "version.py")  # the second holds the version in old releases
VERSION = re.compile(r"^__version__\b[^'\"\n]*=\s*['\"]([^'\"\n]{1,100})['\"]", re.MULTILINE)
MAX_VERSION_FILE_BYTES = 1 << 16


class Kind(StrEnum):
    """How a copy came to where it is."""

    WHEEL = "wheel"
    EDITABLE = "editable install"
    SOURCE = "source tree"
    FOLDER = "folder that no installer knows"
    NAMESPACE = "namespace package"
    MODULE = "single file"
    ARCHIVE = "archive"


@dataclass(frozen=True, slots=True)
class SearchPath:
    """Where Python looks for modules: what finds them, and on which path.

    Attributes:
        entries: folders and archives, in order.
        finders: of `sys.meta_path`; those of editable installs are among them.
        cwd: the working directory, where it is the first entry only because a program starts there.
    """

    entries: tuple[str, ...]
    finders: tuple[Any, ...]
    cwd: str | None = None

    def spec(self, entries: Sequence[str] | None = None, *, only_path: bool = False) -> ModuleSpec | None:
        """What `import sglang` would load, by the import system's own order."""
        path = list(self.entries if entries is None else entries)
        for finder in (PathFinder,) if only_path else self.finders:
            try:
                is_path = finder is PathFinder
                spec = PathFinder.find_spec(PACKAGE, path) if is_path else finder.find_spec(PACKAGE, None)
            except Exception:
                continue  # a foreign finder's own fault, which Python would stop at; the others still count
            if isinstance(spec, ModuleSpec):
                return spec
        return None

    def is_only_cwd(self, entry: str) -> bool:
        """Whether an entry is the working directory, and nothing else put it on the path."""
        places = [os.path.realpath(other) for other in self.entries]
        return entry == self.cwd and places.count(os.path.realpath(entry)) == 1


def server_path() -> SearchPath:
    """The path that `python -m sglang.launch_server` has when it is started as this process was.

    Python puts the working directory first for it, and for a console script the script's folder.
    """
    is_safe, cwd = sys.flags.safe_path, working_folder()
    inherited = [entry for entry in sys.path[0 if is_safe else 1 :] if leads_somewhere(entry, cwd)]
    if is_safe or cwd is None:
        return SearchPath(tuple(inherited), tuple(sys.meta_path))
    return SearchPath((cwd, *inherited), tuple(sys.meta_path), cwd)


def working_folder() -> str | None:
    """The working directory, None where it was deleted or cannot be entered."""
    try:
        return os.getcwd()
    except OSError:
        return None


def leads_somewhere(entry: object, cwd: str | None) -> bool:
    """Whether an entry of `sys.path` is one that Python looks at."""
    return isinstance(entry, str) and "\0" not in entry and (cwd is not None or os.path.isabs(entry))


def without_links(entries: Iterable[str]) -> list[str]:
    """Entries of a path without those that lead to the folder of an earlier one, as lib64 does to lib."""
    kept: dict[str, str] = {}
    for entry in entries:
        kept.setdefault(os.path.realpath(entry), entry)
    return list(kept.values())


@dataclass(frozen=True, slots=True)
class Copy:
    """One SGLang that Python can find.

    Attributes:
        folder: the package's own folder; of a namespace package, its first.
        found_by: the path entry or finder that leads to it.
        version: what its own files say, None where they do not.
        installed_version: what its distribution says, None without one.
        record: the RECORD of the wheel it was installed from.
        num_distributions: how many distributions of the name lie beside it.
    """

    folder: Path
    found_by: str
    kind: Kind
    version: str | None = None
    installed_version: str | None = None
    record: Path | None = None
    num_distributions: int = 0
    checkout: Checkout | None = None

    @property
    def is_importable(self) -> bool:
        """Whether it is a package with SGLang's code in it."""
        return self.kind not in (Kind.NAMESPACE, Kind.MODULE, Kind.ARCHIVE)

    @property
    def told_version(self) -> str:
        return self.version or self.installed_version or "of unknown version"

    def to_json(self) -> dict[str, Any]:
        git = self.checkout
        return {
            "folder": str(self.folder),
            "found_by": self.found_by,
            "kind": str(self.kind),
            "version": self.version,
            "installed_version": self.installed_version,
            "git": git and {"root": git.root, "commit": git.commit, "branch": git.branch,
                            "dirty": list(git.dirty), "problem": git.problem},
        }  # fmt: skip


def find_copies(search: SearchPath) -> list[Copy]:
    """Every copy on the path: first the one that is imported, then the others in the order of the path."""
    importlib.invalidate_caches()
    first = search.spec()
    if first is None:
        return []
    entries = without_links(search.entries)
    specs = [(entry, search.spec([entry], only_path=True)) for entry in entries]
    specs += [(told_finder(f), found_by(f)) for f in search.finders if f is not PathFinder]
    places = {os.path.realpath(folder_of(first)): ("Python's import system", first)}
    named = set()
    for where, spec in specs:
        if spec is not None and (place := os.path.realpath(folder_of(spec))) not in named:
            named.add(place)
            places[place] = (where, spec)
    dists = [dist for dist in distributions(name=PACKAGE, path=entries) if metadata_of(dist)]
    return [make_copy(folder_of(spec), where, spec, dists) for where, spec in places.values()]


def found_by(finder: Any) -> ModuleSpec | None:
    return SearchPath((), (finder,)).spec()


def told_finder(finder: Any) -> str:
    kind = finder if isinstance(finder, type) else type(finder)
    return f"the import hook {kind.__module__}.{kind.__qualname__}"


def folder_of(spec: ModuleSpec) -> Path:
    """Where a package lies; of a module, its file."""
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return Path(os.path.abspath(places[0]))


def make_copy(folder: Path, where: str, spec: ModuleSpec, dists: Sequence[Distribution]) -> Copy:
    """Describe one copy by its folder and the distributions of the path."""
    if spec.submodule_search_locations is None:
        return Copy(folder, where, Kind.MODULE)
    real = Path(os.path.realpath(folder))
    if spec.origin is None:
        return Copy(folder, where, Kind.NAMESPACE, checkout=find_checkout(real))
    if not folder.is_dir():
        return Copy(folder, where, Kind.ARCHIVE)
    beside = [dist for dist in dists if base_of(dist) == folder.parent]
    wheel = newest([dist for dist in beside if record_of(dist)])
    editable = next((dist for dist in dists if is_editable_of(dist, real)), None)
    checkout = find_checkout(real) if wheel is None else None
    kind, dist = Kind.FOLDER, newest(beside)
    if editable is not None:
        kind, dist = Kind.EDITABLE, editable
    elif wheel is not None:
        kind, dist = Kind.WHEEL, wheel
    elif checkout is not None or is_source_tree(real):
        kind = Kind.SOURCE
    return Copy(
        folder, where, kind,
        version=files_version(folder),
        installed_version=version_of(dist),
        record=record_of(dist) if kind is Kind.WHEEL and dist is not None else None,
        num_distributions=len(beside),
        checkout=checkout,
    )  # fmt: skip


def files_version(folder: Path) -> str | None:
    """The version that a package's own files say."""
    for name in VERSION_FILES:
        if os.path.isfile(path := folder / name) and (found := VERSION.search(beginning_of(path))):
            return found[1]
    return None


def beginning_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_VERSION_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def is_source_tree(folder: Path) -> bool:
    return any(os.path.isfile(folder.parent / name) for name in ("pyproject.toml", "setup.py"))


def metadata_of(dist: Distribution) -> Any:
    """A distribution's METADATA; empty where it is missing or broken, as after a half-removed install."""
    try:
        return dist.metadata
    except Exception:  # what importlib.metadata raises for broken files depends on how they are broken
        return None


def version_of(dist: Distribution | None) -> str | None:
    metadata = metadata_of(dist) if dist is not None else None
    return metadata["Version"] if metadata is not None else None


def newest(dists: Sequence[Distribution]) -> Distribution | None:
    """Of distributions beside one package, the one whose files were written last."""
    return max(dists, key=written_at, default=None)


def written_at(dist: Distribution) -> float:
    record = record_of(dist)
    return os.path.getmtime(record) if record else 0.0


def base_of(dist: Distribution) -> Path:
    """The folder that a distribution was installed into."""
    return Path(os.path.abspath(str(dist.locate_file(""))))


def record_of(dist: Distribution) -> Path | None:
    """The RECORD of a distribution's folder; eggs have none."""
    name = version_of(dist)
    for folder in base_of(dist).glob(f"{PACKAGE}-*.dist-info") if name else ():
        record = folder / "RECORD"
        if folder.name == f"{PACKAGE}-{name}.dist-info" and os.path.isfile(record):
            return record
    return None


def is_editable_of(dist: Distribution, folder: Path) -> bool:
    """Whether a distribution says that it is an editable install of a folder around this one."""
    source = editable_source(dist)
    return source is not None and folder.is_relative_to(source)


def editable_source(dist: Distribution) -> Path | None:
    """The folder that an editable install points to (PEP 610)."""
    try:
        found = json.loads(dist.read_text("direct_url.json") or "{}")
        if not found["dir_info"].get("editable"):
            return None
        return Path(os.path.realpath(unquote(urlsplit(found["url"]).path)))
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):
        return None


def entry_points_of(search: SearchPath, group: str) -> Iterator[str]:
    """Names of the entry points of a group, of all distributions on the path."""
    for dist in distributions(path=without_links(search.entries)):
        try:
            names = [point.name for point in dist.entry_points if point.group == group]
        except Exception:  # a file of another package that is broken is not this doctor's patient
            continue
        yield from names
