"""Writes the tables of settings and of backends in docs/sglang.md from the code that checks them.

Run: python scripts/make_sglang_docs.py
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ddtree.config import PluginConfig
from ddtree.sglang_plugin.server_refusals import DRAFT_BACKENDS, UNFIT_BACKENDS, VERIFY_BACKENDS

PAGE = Path(__file__).parents[1] / "docs" / "sglang.md"


def render(page: str) -> str:
    """The page with its tables made anew."""
    return replace_part(replace_part(page, "settings", settings_table()), "backends", backends_table())


def replace_part(page: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: made by scripts/make_sglang_docs.py -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + table + end + after


def settings_table() -> str:
    rows = [
        f"| `{field.name}` | {toml(field.default)} | {field.metadata['help']} |"
        for field in fields(PluginConfig)
    ]
    return lines(["| setting | default | meaning |", "| --- | --- | --- |", *rows])


def backends_table() -> str:
    rows = [f"| {name} | yes | yes | |" for name in VERIFY_BACKENDS]
    for name, reason in UNFIT_BACKENDS.items():
        rows.append(f"| {name} | no | {'yes' if name in DRAFT_BACKENDS else 'no'} | {reason} |")
    return lines(["| backend | verify passes | drafter | |", "| --- | --- | --- | --- |", *rows])


def toml(value: object) -> str:
    """A default as `ddtree.toml` would say it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def lines(texts: list[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
