"""Writes the tables of keys in docs/training.md from the recipe's classes.

Run: python scripts/make_recipe_docs.py
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

from ddtree.train.recipe import TABLES

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
BEGIN = "<!-- keys: made by scripts/make_recipe_docs.py -->\n"
END = "<!-- end of keys -->\n"


def render(page: str) -> str:
    """The page with its tables of keys made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(map(table, TABLES)) + "\n" + END + after


def table(name: str) -> str:
    settings = TABLES[name]
    rows = [
        f"| `{spec.name}` | {toml(spec.default)} | {escape(spec.metadata['help'])} |"
        for spec in fields(settings)
    ]
    header = f"**`[{name}]`** {(settings.__doc__ or '').splitlines()[0]}\n"
    return "\n".join([header, "| key | default | meaning |", "| --- | --- | --- |", *rows, ""])


def toml(value: object) -> str:
    """A default as a recipe would write it."""
    if value is MISSING:
        return "`{}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value:_}`" if isinstance(value, int) else f"`{value}`"


def escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
