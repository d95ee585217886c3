"""What is written survives terminals and pipes of any encoding."""

import io
import json
import sys

import pytest

from ddtree.cli.main import run

TEXT = "你好 \N{EVERGREEN TREE}"


@pytest.fixture
def stdout_of(engine, monkeypatch):
    """Run a command whose standard output has an encoding; returns the bytes it wrote."""
    engine.text = TEXT

    def call(encoding, *arguments):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        assert run(arguments) == 0
        stream.flush()
        return stream.buffer.getvalue()

    return call


def test_text_is_utf8_where_that_can_be_written(stdout_of):
    assert stdout_of("utf-8", "generate", "Hi").decode() == TEXT + "\n"


def test_characters_that_the_encoding_lacks_become_question_marks(stdout_of):
    assert stdout_of("ascii", "generate", "Hi") == b"?? ?\n"


@pytest.mark.parametrize(("encoding", "is_ascii"), [("ascii", True), ("latin-1", True), ("utf-8", False)])
def test_json_loses_nothing_in_any_encoding(stdout_of, encoding, is_ascii):
    written = stdout_of(encoding, "generate", "Hi", "--json")
    assert written.isascii() == is_ascii
    assert json.loads(written.decode(encoding))["text"] == TEXT


def test_the_demo_is_drawn_where_there_is_no_unicode(stdout_of):
    assert b"3 of 3 texts identical" in stdout_of("ascii", "demo")


def test_a_closed_standard_error_does_no_harm(engine, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert run(["generate", "Hi"]) == 0
    assert run(["generate", ""]) == 2


@pytest.mark.parametrize("arguments", [["generate", "Hi"], ["demo"], ["--version"]], ids=" ".join)
def test_a_closed_standard_output_is_refused_before_anything_loads(engine, monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "stdout", None)
    assert run(arguments) == 2
    assert capsys.readouterr().err.startswith("Error: cannot write to standard output: it is closed")
    assert engine.config is None


@pytest.mark.parametrize("arguments", [["demo"], ["generate", "-h"]], ids=" ".join)
def test_a_terminal_of_no_known_width_is_drawn_as_without_one(command, engine, monkeypatch, arguments):
    monkeypatch.delenv("COLUMNS", raising=False)
    expected = command(*arguments)
    for width in ("0", ""):
        monkeypatch.setenv("COLUMNS", width)
        assert command(*arguments) == expected
