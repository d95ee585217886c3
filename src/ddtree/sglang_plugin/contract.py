"""The hook contract: whether an SGLang has every symbol that the plugin touches, in the shape it expects.

The table is `contract_hooks.TABLE`. It is held against the SGLang of this process with `inspect`, or against
the source text of any other without importing it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.contract_ast import PACKAGE, Symbol, SymbolMissing
from ddtree.sglang_plugin.contract_hooks import TABLE
from ddtree.sglang_plugin.contract_installed import InstalledSGLang
from ddtree.sglang_plugin.contract_rules import Hook, difference, parse_version
from ddtree.sglang_plugin.contract_source import installed_package, open_source

FIRST_TESTED = "0.5.17"
LAST_TESTED = "0.5.23"
ALLOW_UNTESTED = "DDTREE_ALLOW_UNTESTED_SGLANG"


class Status(StrEnum):
    """What became of one row of the table."""

    OK = "ok"
    MISSING = "missing"
    CHANGED = "changed"
    OPTIONAL_MISSING = "optional missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row held against one SGLang; `detail` says what differs."""

    hook: Hook
    status: Status
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.status}: {self.hook.path} ({self.hook.kind})"
        return f"{text}: {self.detail}" if self.detail else text


@dataclass(frozen=True, slots=True)
class ContractReport:
    """The whole table held against one SGLang.

    Attributes:
        version: SGLang's, empty where it says none.
        where: what was looked at.
        findings: one a row that is about this version.
        refusal: why the version alone is refused, or empty.
        warning: what to know of the version, or empty.
    """

    version: str
    where: str
    findings: tuple[Finding, ...]
    refusal: str = ""
    warning: str = ""

    @property
    def problems(self) -> list[str]:
        """What stops the plugin, one line each."""
        broken = [str(f) for f in self.findings if f.status in (Status.MISSING, Status.CHANGED)]
        return [self.refusal, *broken] if self.refusal else broken

    @property
    def warnings(self) -> list[str]:
        """What the plugin works without, one line each."""
        lost = [str(f) for f in self.findings if f.status is Status.OPTIONAL_MISSING]
        return [self.warning, *lost] if self.warning else lost

    @property
    def is_ok(self) -> bool:
        return not self.problems

    @property
    def exit_code(self) -> int:
        return 0 if self.is_ok else 1

    @property
    def verdict(self) -> str:
        """One line: whether DDTREE can run in this SGLang."""
        name = f"SGLang {self.version or 'of unknown version'}"
        counts = Counter(finding.status for finding in self.findings)
        if self.refusal and not counts[Status.MISSING] and not counts[Status.CHANGED]:
            needed = "needed " if counts[Status.OPTIONAL_MISSING] else ""
            return (
                f"{name} ({self.where}): all {needed}symbols fit, but the version is "
                f"{'untested' if self.version else 'unknown'} (tested: {FIRST_TESTED} to {LAST_TESTED}): "
                f"DDTREE refuses it unless {ALLOW_UNTESTED}=1"
            )
        told = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
        return f"DDTREE {'fits' if self.is_ok else 'does not fit'} {name} ({self.where}): {told}"

    @property
    def text(self) -> str:
        """The verdict and every difference, for a log."""
        return "\n".join([self.verdict, *(f"  {line}" for line in [*self.problems, *self.warnings])])

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        rows = [
            {"path": f.hook.path, "kind": f.hook.kind, "status": f.status, "detail": f.detail}
            for f in self.findings
        ]
        return {
            "fits": self.is_ok,
            "verdict": self.verdict,
            "version": self.version,
            "where": self.where,
            "refusal": self.refusal,
            "warning": self.warning,
            "symbols": rows,
        }


class Symbols(Protocol):
    """Where symbols are looked up."""

    def find(self, path: str) -> Symbol:
        """The symbol of a path, or `SymbolMissing`."""


def check_installed(environ: Mapping[str, str] = os.environ) -> ContractReport:
    """Hold the table against the SGLang of this process, with `inspect` where a module is imported.

    Others are read, since importing them all takes seconds and only a scheduler needs them.

    Raises:
        ConfigError: SGLang is not installed, or its files cannot be read or parsed.
    """
    package = installed_package()
    if package is None:
        raise ConfigError("SGLang is not installed in this Python: install it beside sglang-ddtree")
    installed = InstalledSGLang(open_source(package))
    return make_report(installed, installed.version(), str(package), environ)


def check_imported(environ: Mapping[str, str] = os.environ) -> ContractReport:
    """Hold the table against the SGLang of this process, with `inspect` alone: imports what is not yet."""
    installed = InstalledSGLang()
    return make_report(installed, installed.version(), "imported", environ)


def check_source(
    path: Path | str, environ: Mapping[str, str] = os.environ, version: str | None = None
) -> ContractReport:
    """Hold the table against a wheel, a site-packages folder or a source tree, without importing it.

    `version` is taken where the files name none.

    Raises:
        ConfigError: there is no SGLang at that path, or its files cannot be read or parsed.
    """
    source = open_source(Path(path))
    return make_report(source, source.version() or version, source.files.where, environ)


def make_report(
    symbols: Symbols,
    version: str | None,
    where: str,
    environ: Mapping[str, str],
    table: Iterable[Hook] = TABLE,
) -> ContractReport:
    """Hold the rows about a version against its symbols."""
    refusal, warning = version_remarks(version, environ)
    release = parse_version(version or "") or parse_version(LAST_TESTED)
    findings = tuple(check_hook(hook, symbols) for hook in table if hook.is_about(release))
    return ContractReport(version or "", where, findings, refusal, warning)


def check_hook(hook: Hook, symbols: Symbols) -> Finding:
    """Hold one row against its symbol."""
    try:
        symbol = symbols.find(hook.path)
        inherited = symbols.find(hook.besides).parameters if hook.besides else None
        detail, status = difference(hook, symbol, inherited or ()), Status.CHANGED
    except SymbolMissing as error:
        detail, status = str(error), Status.MISSING
    if detail is None:
        return Finding(hook, Status.OK)
    if hook.loses:
        return Finding(hook, Status.OPTIONAL_MISSING, f"{detail}; without it: {hook.loses}")
    return Finding(hook, status, detail)


def version_remarks(version: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """Why a version is refused, and what to know of it; both are empty for a tested one."""
    release = parse_version(version or "")
    if release and parse_version(FIRST_TESTED) <= release <= parse_version(LAST_TESTED):
        return "", ""
    told = f"{PACKAGE} {version} is" if version else f"the version of {PACKAGE} is unknown, so perhaps"
    untested = f"{told} outside of the tested versions {FIRST_TESTED} to {LAST_TESTED}"
    if environ.get(ALLOW_UNTESTED) == "1":
        return "", f"{untested}; {ALLOW_UNTESTED}=1 lets it run"
    return f"{untested}; install one of these, or set {ALLOW_UNTESTED}=1 to try this one", ""
