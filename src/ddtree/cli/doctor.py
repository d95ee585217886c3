"""`ddtree doctor`: whether DDTREE can run in an SGLang."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ddtree.cli.console import StdoutConsole, write, write_json
from ddtree.cli.exit_codes import DOES_NOT_FIT
from ddtree.errors import ConfigError
from ddtree.provenance import package_version

if TYPE_CHECKING:
    from ddtree.sglang_plugin.contract import ContractReport

NOT_INSTALLED = "SGLang is not installed in this Python; name a wheel or folder with --sglang-wheel"

EPILOG = """Examples:

ddtree doctor

ddtree doctor --sglang-wheel sglang-0.5.23-cp312-cp312-manylinux_2_34_x86_64.whl

ddtree doctor --sglang-wheel ~/sglang --json"""


def doctor(
    *,
    sglang_wheel: Annotated[
        str | None,
        typer.Option(
            help="a wheel, source tree or site-packages folder to look at (default: the installed SGLang)",
            metavar="PATH", rich_help_panel="SGLang",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="write one JSON object to standard output", rich_help_panel="Output"),
    ] = False,
) -> None:  # fmt: skip
    """Check that SGLang has all that the plugin touches, without importing it.

    Without --sglang-wheel the plugin's settings, from DDTREE_CONFIG or ddtree.toml, are checked too. Ends
    with 1 if DDTREE cannot run there, if no SGLang is installed, or if a setting is wrong; also where all
    symbols fit but the version is unknown or untested, unless DDTREE_ALLOW_UNTESTED_SGLANG=1 is set. With
    --json a mistake in the request, which ends with 2, is written as {"error": "..."} too.
    """
    try:
        report = _contract(sglang_wheel)
    except ConfigError as error:
        if as_json:
            write_json({"error": str(error)})
        raise
    settings = _settings() if sglang_wheel is None else None
    if as_json:
        found = {"sglang": _as_json(report)}
        write_json(found if settings is None else {**found, "settings": settings})
    else:
        if report is None:
            write(f"{NOT_INSTALLED}\n")
        else:
            _show(report)
        if settings is not None:
            write(f"{_settings_line(settings)}\n")
    if report is None or not report.is_ok or (settings is not None and not settings["fits"]):
        raise typer.Exit(DOES_NOT_FIT)


def _contract(path: str | None) -> ContractReport | None:
    """The contract held against the SGLang at a path, or the installed one; None where there is none."""
    from ddtree.sglang_plugin.contract import check_source
    from ddtree.sglang_plugin.contract_source import installed_package

    if path is not None:
        return check_source(_expanded(path))
    installed = installed_package()
    return check_source(installed, version=package_version("sglang")) if installed else None


def _expanded(path: str) -> Path:
    """A path as it was typed, with "~" and "~user" written out.

    Raises:
        ConfigError: it is empty, or there is no such user.
    """
    from ddtree.sglang_plugin.contract_files import WANTED

    if not path:
        raise ConfigError(f"--sglang-wheel is empty: give {WANTED}")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--sglang-wheel {path!r} cannot be read: {error} Give {WANTED}") from None


def _settings() -> dict[str, Any]:
    """The plugin's settings as a server that is started here would read them, or what is wrong in them."""
    from ddtree.sglang_plugin.settings import load_config

    try:
        return {"fits": True, "values": asdict(load_config(os.environ, Path.cwd()))}
    except ConfigError as error:
        return {"fits": False, "error": str(error)}


def _settings_line(settings: dict[str, Any]) -> str:
    if not settings["fits"]:
        return f"settings are wrong: {' '.join(settings['error'].split())}"
    return f"settings: {', '.join(f'{name}={value}' for name, value in settings['values'].items())}"


def _as_json(report: ContractReport | None) -> dict[str, Any]:
    return report.to_json() if report else {"fits": False, "verdict": NOT_INSTALLED}


def _show(report: ContractReport) -> None:
    console = StdoutConsole()
    console.print(contract_table(report))
    for line in [*report.problems, *report.warnings]:
        console.print(line, soft_wrap=True)
    console.print(report.verdict, soft_wrap=True)


def contract_table(report: ContractReport) -> Table:
    """One row a module of SGLang: how many symbols the plugin touches there, by what became of them."""
    from ddtree.sglang_plugin.contract import Status

    table = Table(
        title=f"hook contract, SGLang {report.version or 'of unknown version'}", title_justify="left"
    )
    table.add_column("module")
    for status in Status:
        table.add_column(status, justify="right")
    modules: dict[str, Counter[str]] = {}
    for finding in report.findings:
        modules.setdefault(finding.hook.path.partition(":")[0], Counter())[finding.status] += 1
    for module, counts in sorted(modules.items()):
        table.add_row(module, *(str(counts[status] or "") for status in Status))
    return table
