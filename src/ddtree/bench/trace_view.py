"""A trace as one HTML page to step through: every round's tree, the path it committed, the text so far.

The page needs no network and no other file. Its policy lets it run nothing but its own script, and what a
trace says reaches it as data, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ddtree.bench.trace_view_data import page_data
from ddtree.bench.trace_view_part import Limits, TracePart, read_part
from ddtree.bench.trace_view_text import IdTexts, Texts, find_texts
from ddtree.bench.whole_files import write_whole
from ddtree.errors import ConfigError, short_repr

SCRIPTS = ("trace_view_tree.js", "trace_view_requests.js", "trace_view.js")  # one after the other
DOCTYPE = "<!doctype html>"
PLACE = re.compile(r"@(title|policy|style|data|script)@")


def trace_page(part: TracePart, *, title: str, texts: Texts | None = None, notes: Sequence[str] = ()) -> str:
    """The page of a trace.

    Args:
        part: what `read_part` took of it.
        title: its headline, such as the trace's file name.
        texts: tokens to texts; None shows their ids.
        notes: sentences to show above the requests.
    """
    data = page_data(part, texts or IdTexts(), title, notes)
    style, script = static("trace_view.css"), "\n".join(map(static, SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{checksum(script)}'; style-src '{checksum(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    values = {
        "title": html.escape(printable(title)),
        "policy": policy,
        "style": style,
        "data": inert_json(data),
        "script": script,
    }
    return PLACE.sub(lambda place: values[place[1]], static("trace_view.html"))


def write_trace_page(
    trace: Path, output: Path, *, model: str | None = None, limits: Limits | None = None
) -> TracePart:
    """Write the page of a trace file and return the part of the trace that it shows.

    Args:
        trace: a file of the engine's or the plugin's (docs/traces.md).
        output: the page; one that is there is replaced.
        model: whose tokenizer gives the texts; None for the trace's own target, if it lies on this machine.
        limits: how much of the trace is taken.

    Raises:
        ConfigError: the trace cannot be read, or the page not written.
        ModelError: the tokenizer of `model` cannot be found or read.
        MissingExtraError: `model` is given and transformers is not installed.
    """
    check_output(output)
    part = read_part(trace, limits)
    texts, problem = find_texts(part.trace.header.target.get("name"), model)
    notes = [f"Tokens are shown by their ids: {problem}."] if problem else []
    page = trace_page(part, title=trace.name, texts=texts, notes=notes)
    try:
        write_whole({output: page.encode()})
    except OSError as error:
        raise cannot_write(output, error.strerror) from error
    return part


def check_output(output: Path) -> None:
    """Raise `ConfigError` for what cannot be the page, such as a file that is there and is no HTML page."""
    try:
        reason = why_not(output)
    except (OSError, ValueError) as error:  # ValueError: what is no path
        raise cannot_write(output, getattr(error, "strerror", None) or error) from error
    if reason:
        raise cannot_write(output, reason)


def why_not(output: Path) -> str | None:
    """Why a page cannot be written there; None if it may be."""
    if output.is_dir():
        return "it is a folder"
    if not output.parent.is_dir():
        return "its folder is not there"
    try:
        with output.open("rb") as file:
            begin = file.read(len(DOCTYPE))
    except FileNotFoundError:
        return None
    is_page = not begin or begin.lower() == DOCTYPE.encode()
    return None if is_page else "it is there and is no HTML page"


def cannot_write(output: Path, reason: object) -> ConfigError:
    return ConfigError(f"the page {short_repr(str(output))} cannot be written: {reason}; name another file")


def static(name: str) -> str:
    """A source of the page."""
    return (files("ddtree.bench") / "static" / name).read_text(encoding="utf-8")


def checksum(source: str) -> str:
    """A source as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def inert_json(data: object) -> str:
    """JSON in ASCII that is safe inside a script element: nothing in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def printable(text: str) -> str:
    """A text in which nothing changes the direction or the form of what stands around it."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
