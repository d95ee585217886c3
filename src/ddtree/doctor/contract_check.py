"""The hook contract, DFLASH, and the plugin's settings, as the doctor tells them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddtree.config import PluginConfig
from ddtree.doctor.copies import Copy
from ddtree.doctor.report import Finding, Level, Section
from ddtree.errors import ConfigError, counted
from ddtree.sglang_plugin import contract
from ddtree.sglang_plugin.contract import ContractReport, Status
from ddtree.sglang_plugin.contract_files import SourceFiles, open_files
from ddtree.sglang_plugin.settings import load_config

NOT_INSTALLED = "SGLang is not installed in this Python; name a wheel or folder with --sglang-wheel"
NOT_SGLANG = "what Python finds by the name of sglang cannot be looked into"
UPGRADE = f"pip install sglang=={contract.LAST_TESTED}"
WHY_TESTED = "what a plugin relies on changes from release to release without a name changing"
WHY_TOUCHED = "the plugin calls, reads or overrides it"
WHY_LOST = "DDTREE runs without it, and without what stands there"
NO_MODULE = "there is no module "
WORKERS = {
    "sglang/srt/speculative/dflash_worker_v2.py": "the second worker, which DDTREE builds on",
    "sglang/srt/speculative/dflash_worker.py": "the first worker only, which DDTREE cannot use",
}
BROKEN = (Status.MISSING, Status.CHANGED)


def contract_section(report: ContractReport) -> Section:
    """The verdict line by line; modules that are not there are one line."""
    found = [Finding(
        "contract.verdict", Level.OK if report.is_ok else Level.ERROR, report.verdict,
        why="" if report.is_ok else "SGLang would say: Unknown speculative algorithm name: DDTREE",
        todo="" if report.is_ok else UPGRADE,
    )]  # fmt: skip
    for level, told in ((Level.ERROR, report.refusal), (Level.WARN, report.warning)):
        if told:
            found.append(Finding("contract.version", level, told, why=WHY_TESTED, todo=UPGRADE))
    found += module_findings(report)
    for row in report.findings:
        if row.status in BROKEN and not row.detail.startswith(NO_MODULE):
            found.append(Finding("contract.symbol", Level.ERROR, str(row), why=WHY_TOUCHED, todo=UPGRADE))
        elif row.status is Status.OPTIONAL_MISSING and not row.detail.startswith(NO_MODULE):
            found.append(Finding("contract.optional", Level.WARN, str(row), why=WHY_LOST, todo=UPGRADE))
    return Section("sglang", "The hook contract", tuple(found), report.to_json(), tuple(module_table(report)))


def module_findings(report: ContractReport) -> list[Finding]:
    """The modules that are not there, in one finding, and what is only lost with such modules in another."""
    rows = [row for row in report.findings if row.detail.startswith(NO_MODULE)]
    needed = [row for row in rows if row.status in BROKEN]
    lost = [row.hook.path for row in rows if row.status is Status.OPTIONAL_MISSING]
    found = []
    if needed:
        modules = tuple(dict.fromkeys(row.detail.removeprefix(NO_MODULE) for row in needed))
        symbols = counted(len(needed), "symbol")
        told = f"missing: {counted(len(modules), 'module')} with {symbols} of the contract"
        found.append(
            Finding("contract.module", Level.ERROR, told, why=WHY_TOUCHED, todo=UPGRADE, names=modules)
        )
    if lost:
        told = f"optional missing: {counted(len(lost), 'symbol')} in modules that are not there"
        found.append(
            Finding("contract.optional", Level.WARN, told, why=WHY_LOST, todo=UPGRADE, names=tuple(lost))
        )
    return found


def module_table(report: ContractReport) -> list[str]:
    """One line a module of SGLang: what became of the symbols that the plugin touches there."""
    modules: dict[str, Counter[str]] = {}
    for row in report.findings:
        modules.setdefault(row.hook.path.partition(":")[0], Counter())[row.status] += 1
    counts = {
        module: ", ".join(f"{count[status]} {status}" for status in Status if count[status])
        for module, count in sorted(modules.items())
    }
    width = max(map(len, counts), default=0)
    return [f"{module:<{width}}  {told}" for module, told in counts.items()]


def no_contract_section(problem: str = "", *, is_there: bool) -> Section:
    """In place of the contract where there is no SGLang to hold it against."""
    verdict = problem or (NOT_SGLANG if is_there else NOT_INSTALLED)
    finding = Finding(
        "contract.verdict", Level.ERROR, verdict,
        why="whether DDTREE fits cannot be told",
        todo=UPGRADE if is_there else f"{UPGRADE} beside sglang-ddtree",
    )  # fmt: skip
    return Section("sglang", "The hook contract", (finding,), {"fits": False, "verdict": verdict})


def unseen_contract_section() -> Section:
    """In place of the contract where the server would run elsewhere, and no SGLang is here."""
    verdict = "SGLang was not looked at: it is not installed here"
    finding = Finding(
        "contract.verdict", Level.WARN, verdict,
        why="whether DDTREE fits the SGLang of the machine planned for cannot be told",
        todo="run ddtree doctor there, or here with --sglang-wheel and that SGLang's wheel or folder",
    )  # fmt: skip
    return Section("sglang", "The hook contract", (finding,), {"fits": None, "verdict": verdict})


def installed_contract(
    copy: Copy | None, environ: Mapping[str, str], *, is_there: bool, is_elsewhere: bool = False
) -> Section:
    """The contract held against the copy that would be imported."""
    if is_elsewhere and not is_there:
        return unseen_contract_section()
    if copy is None:
        return no_contract_section(is_there=is_there)
    try:
        report = contract.check_source(copy.folder, environ, version=copy.version or copy.installed_version)
    except ConfigError as error:
        return no_contract_section(f"SGLang's files cannot be checked: {error}", is_there=True)
    return contract_section(report)


def dflash_section(path: Path | None) -> Section:
    """Whether SGLang has DFLASH, by the worker that it has; `path` is None where no SGLang is found."""
    title = "DFLASH"
    if path is None:
        return Section("dflash", title, (), {"present": False, "workers": []})
    workers = dflash_workers(path)
    if workers is None:
        return Section("dflash", title, (), {"present": None, "workers": []})
    told = f"DFLASH is there: {WORKERS[workers[0]]}" if workers else "DFLASH is not there"
    if workers[:1] == [next(iter(WORKERS))]:
        found = Finding("dflash.worker", Level.OK, told)
    else:
        found = Finding(
            "dflash.worker", Level.ERROR, told,
            why="DDTREE drafts with the second worker, which SGLang has from 0.5.14 on",
            todo=UPGRADE, names=tuple(workers),
        )  # fmt: skip
    return Section("dflash", title, (found,), {"present": bool(workers), "workers": workers})


def dflash_workers(path: Path) -> list[str] | None:
    """DFLASH's workers that are there, the second before the first; None where nothing can be read."""
    try:
        files: SourceFiles = open_files(path)
        return [name for name in WORKERS if files.read(name) is not None]
    except ConfigError:
        return None


def settings_section(environ: Mapping[str, str], cwd: Path) -> tuple[Section, PluginConfig]:
    """The plugin's settings as a server that is started here would read them; the defaults if wrong."""
    try:
        config = load_config(environ, cwd)
    except ConfigError as error:
        finding = Finding(
            "settings.wrong", Level.ERROR, f"settings are wrong: {' '.join(str(error).split())}",
            why="DDTREE is not registered with wrong settings",
            todo="correct DDTREE_CONFIG, or ddtree.toml in the working directory",
        )  # fmt: skip
        section = Section("settings", "Settings", (finding,), {"fits": False, "error": str(error)})
        return section, PluginConfig()
    values: dict[str, Any] = asdict(config)
    told = ", ".join(f"{name}={value}" for name, value in values.items())
    finding = Finding("settings.values", Level.OK, f"settings: {told}")
    return Section("settings", "Settings", (finding,), {"fits": True, "values": values}), config
