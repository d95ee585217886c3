"""Writes docs/cli.md from the commands' signatures. Run: python scripts/make_cli_docs.py

The signatures and not typer's help pages are read, since those differ from typer to typer.
"""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from ddtree.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEADER = """# The command line

This page is made from the commands by `scripts/make_cli_docs.py`. Exit codes: 0 done; 1 the demo's texts
differ, `replay` or `compare` found a real difference, the doctor something that stops DDTREE, or an engine of
`bench` failed; 2 a mistake in the request, told in one line on standard error; 75 training was stopped by
`--max-seconds` and goes on with the same command; 130 ended by Ctrl-C, 143 by SIGTERM.
"""
KINDS = {int: "N", float: "X", str: "TEXT", list[int]: "N", list[str]: "TEXT"}


def render() -> str:
    """The whole page."""
    return "\n".join([HEADER, *(command_page(command) for command in app.registered_commands)])


def command_page(command: Any) -> str:
    """A command: what it does, its flags by panel, its examples."""
    panels: dict[str, list[str]] = {}
    for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
        if parameter.annotation is typer.Context:
            continue
        kind, info = get_args(parameter.annotation)
        row = f"| {names(parameter.name, kind, info)} | {default(parameter.default)} | {escape(info.help)} |"
        panels.setdefault(info.rich_help_panel or "Arguments", []).append(row)
    parts = [f"## `ddtree {command.name}`\n", paragraphs(command.callback.__doc__)]
    for title, rows in panels.items():
        parts += [f"**{title}**\n", "| flag | default | meaning |", "| --- | --- | --- |", *rows, ""]
    examples = command.epilog.split("\n\n")[1:]
    return "\n".join([*parts, "**Examples**\n", "```sh", *examples, "```", ""])


def paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")) + "\n"


def names(name: str, kind: Any, info: Any) -> str:
    """The flag as it is typed, with the kind of its value."""
    if type(info).__name__ == "ArgumentInfo":
        return f"`{name.upper()}`"
    given = [info.default, *(info.param_decls or ())]  # where typer keeps names inside Annotated
    flags = [flag.strip(" /") for flag in given if isinstance(flag, str)] or [f"--{name.replace('_', '-')}"]
    shown = ", ".join(f"`{flag}`" for flag in flags)
    return shown if kind is bool else f"{shown} {escape(value_kind(kind, info))}"


def value_kind(kind: Any, info: Any) -> str:
    if info.metavar:
        return str(info.metavar)
    values = get_args(kind)[0] if get_origin(kind) is list else kind
    if isinstance(values, type) and issubclass(values, Enum):
        return "|".join(values)
    return KINDS.get(kind, "PATH")


def default(value: Any) -> str:
    if value in (None, "", [], inspect.Parameter.empty) or isinstance(value, bool):
        return ""
    return f"`{value}`"


def escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
