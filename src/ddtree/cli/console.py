"""Standard output and standard error of a command."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

from rich.console import Console
from rich.text import Text

from ddtree.cli.options import Output
from ddtree.errors import DDTreeError

PIPE_COLUMNS = 110


def prepare_streams() -> None:
    """Let no character end a command: what the terminal's encoding lacks is shown as a question mark.

    Raises:
        DDTreeError: standard output is closed.
    """
    sys.stderr = sys.stderr or io.StringIO()  # None where the caller closed it
    if sys.stdout is None:
        raise DDTreeError("cannot write to standard output: it is closed; send it to /dev/null to drop it")
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]  # a width of 0, by which some shells mean that they do not know it
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def messages(output: Output) -> Iterator[Console]:
    """The console on standard error, with logging as asked for."""
    if output.quiet:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stderr(nowhere),
            _logging(logging.ERROR),
        ):
            yield Console(stderr=True)
    else:
        with _logging(logging.INFO if output.verbose else logging.WARNING):
            yield Console(stderr=True, highlight=False)


@contextmanager
def _logging(level: int) -> Iterator[None]:
    logger = logging.getLogger("ddtree")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def write(text: str) -> None:
    """Write to standard output at once.

    Raises:
        DDTreeError: the output cannot be written, as on a full disk.
        BrokenPipeError: the reader went away.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DDTreeError(f"cannot write to standard output: {error.strerror}") from error


def write_json(document: Mapping[str, Any]) -> None:
    """Write one JSON object, in plain ASCII where standard output is not UTF-8."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    write(json.dumps(document, ensure_ascii=not is_utf8, indent=2) + "\n")


class StdoutConsole(Console):
    """Tables and trees on standard output, of a width that holds them where there is no terminal."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False)
        if not self.is_terminal:
            self.width = PIPE_COLUMNS

    def on_broken_pipe(self) -> None:
        # Rich would end the process with 1, which says here that texts differ.
        raise BrokenPipeError


def plain_text(text: str) -> Text:
    """Text of a model for the terminal: no markup, and control characters shown, not obeyed."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text))
