"""A report as blocks that are written as Markdown and as HTML alike.

Prose and table cells are Markdown; whatever comes from a file goes through `escaped` first. The HTML needs
nothing from outside, and links nowhere.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

MISSING = "—"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# The focus lets keyboards scroll a table that is wider than the page.
SCROLLS = '<div class="table" role="group" aria-label="Table" tabindex="0">'
MAX_UNBROKEN = 40  # characters of a cell in one line
MAX_TEXT = 300  # characters of a text from a file


@dataclass(frozen=True, slots=True)
class Text:
    """Markdown paragraphs, lists, tables and code."""

    markdown: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        head, rows: cells in Markdown, each row as long as the head.
        caption: in Markdown; empty for none.
        num_text_columns: how many columns, from the left, are read and not compared.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    num_text_columns: int = 1


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot, with its name (no ending), a title and what it shows for those who do not see it."""

    name: str
    title: str
    alt: str
    svg: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it; a folded one is opened by its reader."""

    title: str
    blocks: Sequence[Block]
    is_folded: bool = False


Block = Text | Table | Picture


@dataclass(frozen=True, slots=True)
class Document:
    """A title, an introduction in Markdown, sections, and pages beside it by their titles."""

    title: str
    introduction: str
    sections: Sequence[Section] = ()
    pages: Mapping[str, str] = field(default_factory=dict)

    def pictures(self) -> list[Picture]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]


def escaped(text: object) -> str:
    """A text from a file as Markdown that shows it as it is, in one line, control characters too."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
    if len(line) > MAX_TEXT:
        line = f"{line[:MAX_TEXT]}…"
    # An underscore within a word marks nothing up.
    return re.sub(r"[\\`*\[\]<>&|~$#!]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)


def code(text: object) -> str:
    """A text from a file as a code span in one line."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)) or " "
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"


# -- Markdown --------------------------------------------------------------------------------------


def to_markdown(document: Document, picture_ending: str = ".png", picture_folder: str = "") -> str:
    """The document as Markdown, pictures as files beside it."""
    parts = [f"# {document.title}", document.introduction]
    parts += [f"[{title}]({page})" for title, page in document.pages.items()]
    for section in document.sections:
        parts += [f"## {section.title}", *markdown_blocks(section.blocks, picture_ending, picture_folder)]
    return "\n\n".join(parts) + "\n"


def markdown_blocks(
    blocks: Sequence[Block], picture_ending: str = ".png", picture_folder: str = ""
) -> Iterator[str]:
    """Each block as Markdown."""
    for block in blocks:
        if isinstance(block, Table):
            yield markdown_table(block)
        elif isinstance(block, Picture):
            yield f"![{escaped(block.alt)}]({picture_folder}{block.name}{picture_ending})"
        else:
            yield block.markdown


def markdown_table(table: Table) -> str:
    """The table under its caption."""
    places = ["---" if i < table.num_text_columns else "---:" for i in range(len(table.head))]
    lines = [table.head, places, *table.rows]
    caption = f"**{table.caption}**\n\n" if table.caption else ""
    return caption + "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -- HTML ------------------------------------------------------------------------------------------


def to_html(document: Document, style: str) -> str:
    """The document as one page that holds its pictures and its style."""
    ids = [f"s{number}" for number in range(1, len(document.sections) + 1)]
    links = "".join(
        f'<li><a href="#{name}">{_inline(section.title)}</a></li>'
        for name, section in zip(ids, document.sections, strict=True)
    )
    links += "".join(
        f'<li><a href="{html.escape(page)}">{_inline(title)}</a></li>'
        for title, page in document.pages.items()
    )
    sections = "\n".join(
        _html_section(name, section) for name, section in zip(ids, document.sections, strict=True)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{html.escape(document.title)}</title>
<style>
{style}
</style>
</head>
<body>
<header>
<h1>{_inline(document.title)}</h1>
{_block(document.introduction)}</header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>
{sections}
</main>
</body>
</html>
"""


def _html_section(name: str, section: Section) -> str:
    inner = "\n".join(_html_block(block) for block in section.blocks)
    title = f"<h2>{_inline(section.title)}</h2>"
    if section.is_folded:
        inner = f"<details><summary>{title}</summary>\n{inner}\n</details>"
        title = ""
    return f'<section id="{name}">\n{title}{inner}\n</section>'


def _html_block(block: Block) -> str:
    if isinstance(block, Table):
        return _html_table(block)
    if isinstance(block, Picture):
        data = base64.b64encode(block.svg.encode()).decode("ascii")
        return (
            f'<figure><img alt="{html.escape(block.alt)}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{_inline(block.title)}</figcaption></figure>"
        )
    return _block(block.markdown)


def _html_table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{_kind(i, "", table)}>{_inline(cell)}</th>' for i, cell in enumerate(table.head)
    )
    rows = "\n".join(
        "<tr>" + "".join(_html_cell(i, cell, table) for i, cell in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{_inline(table.caption)}</caption>" if table.caption else ""
    return f"{SCROLLS}<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"


def _html_cell(column: int, cell: str, table: Table) -> str:
    kind = _kind(column, cell, table)
    return f'<th scope="row"{kind}>{_inline(cell)}</th>' if column == 0 else f"<td{kind}>{_inline(cell)}</td>"


def _kind(column: int, cell: str, table: Table) -> str:
    if column >= table.num_text_columns:
        return ""
    return ' class="text long"' if len(cell) > MAX_UNBROKEN else ' class="text"'


def _inline(markdown: str) -> str:
    return str(_reader().renderInline(markdown))


def _block(markdown: str) -> str:
    made = str(_reader().render(markdown))
    return made.replace("<table>", f"{SCROLLS}<table>").replace("</table>", "</table></div>")


@lru_cache(maxsize=1)
def _reader() -> MarkdownIt:
    """Markdown without raw HTML, links or images."""
    from markdown_it import MarkdownIt  # rich needs it, so it is there

    reader = MarkdownIt("commonmark", {"html": False})
    return reader.enable("table").disable(["link", "image", "autolink", "html_block", "html_inline"])
