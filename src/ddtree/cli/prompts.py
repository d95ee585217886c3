"""Reads the prompt: one argument, file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from ddtree.errors import ConfigError

STDIN = "-"


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from its one source; a single newline at the end of a file or of standard input is dropped.

    Raises:
        ConfigError: no source or two, a file that cannot be read, text that is empty or not UTF-8.
    """
    if argument is not None and file is not None:
        raise ConfigError("PROMPT and --file are both given: give one of them")
    if argument is not None and argument != STDIN:
        text = _checked_argument(argument)
    elif file is not None and str(file) != STDIN:
        text = _decode(_read_file(file), repr(str(file)))
    else:
        text = _decode(_read_stdin(is_named=STDIN in (argument, str(file))), "standard input")
    if not text.strip():
        raise ConfigError(f"prompt={text[:20]!r} is not allowed: some text; give a prompt that is not empty")
    return text


def _checked_argument(argument: str) -> str:
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise ConfigError("PROMPT is not UTF-8: give it in UTF-8") from None
    return argument


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}; name a text file") from error


def _read_stdin(*, is_named: bool) -> bytes:
    if sys.stdin is None or (sys.stdin.isatty() and not is_named):
        raise ConfigError("no prompt: give it as PROMPT, with --file or on standard input")
    return sys.stdin.buffer.read()


def _decode(content: bytes, source: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 (byte {error.start}): convert it to UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")
