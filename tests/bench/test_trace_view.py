"""The page as a file: one, whole, inert, and written with care."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.bench.trace_view import checksum, inert_json, trace_page, write_trace_page
from ddtree.bench.trace_view_part import Limits
from ddtree.errors import ConfigError, ModelError
from trace_view_kit import HEADER, part_of, plain_request, write_trace

HOSTILE = "</script><script>hacked=1</script><!-- @script@ @data@ \u202e\x00\u2028 & \"' 🌲 \ud800"


class Page(HTMLParser):
    """Elements with their attributes, and the text within scripts, styles and the title."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open:
            self.texts[self._open][-1] += data


class HostileTexts:
    def one(self, token):
        return HOSTILE

    def joined(self, tokens):
        return HOSTILE * len(tokens)


def page_of(**changes) -> Page:
    return Page(trace_page(part_of(plain_request()), **({"title": "t.jsonl"} | changes)))


def test_it_is_one_file_with_unique_ids():
    page = page_of()
    assert [tag for tag, _ in page.elements if tag in ("img", "iframe", "object", "base", "form")] == []
    addresses = [
        value for _, names in page.elements for name, value in names.items() if name in ("src", "href")
    ]
    assert addresses == ["data:,"]
    ids = [names["id"] for _, names in page.elements if "id" in names]
    assert len(ids) == len(set(ids))
    assert [name for _, names in page.elements for name in names if name.startswith("on")] == []


def test_the_policy_lets_it_run_its_own_script_only():
    page = page_of()
    policy = next(
        names["content"]
        for tag, names in page.elements
        if names.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    _, script = page.texts["script"]
    assert f"script-src '{checksum(script)}';" in policy
    assert f"style-src '{checksum(page.texts['style'][0])}';" in policy


def test_hostile_texts_and_names_are_data():
    traced = plain_request(HOSTILE)
    traced = traced._replace(request=replace(traced.request, server_id=HOSTILE, sampling={HOSTILE: HOSTILE}))
    source = trace_page(part_of(traced), title=HOSTILE, texts=HostileTexts(), notes=[HOSTILE])
    page, plain = Page(source), page_of()
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.texts["script"][1] == plain.texts["script"][1]
    data = json.loads(page.texts["script"][0])
    assert data["title"] == data["notes"][0] == data["requests"][0]["id"] == HOSTILE
    assert data["texts"]["1"] == HOSTILE
    shown = page.texts["title"][0]
    assert "<script>" in shown
    assert not re.search("[\u202e\x00\u2028\ud800]", source)


@settings(max_examples=20, deadline=None)
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_data_cannot_end_its_element(value):
    text = inert_json(value)
    assert text.isascii()
    assert not set(text) & set("<>&")
    assert json.loads(text) == value


def test_writing(tmp_path):
    trace = write_trace(tmp_path / "t.jsonl", plain_request("a"), plain_request("b"))
    output = tmp_path / "t.html"
    part = write_trace_page(trace, output, limits=Limits(max_requests=1))
    data = json.loads(Page(output.read_text(encoding="utf-8")).texts["script"][0])
    assert [request["id"] for request in data["requests"]] == ["a"]
    assert part.requests_left == 1
    assert data["title"] == "t.jsonl"
    assert data["notes"][0].startswith("Tokens are shown by their ids: ")
    assert "1 of 2 requests" in data["notes"][1]
    write_trace_page(trace, output)
    assert len(json.loads(Page(output.read_text(encoding="utf-8")).texts["script"][0])["requests"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.html", "t.jsonl"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("notes.txt", "it is there and is no HTML page"),
        ("t.jsonl", "it is there and is no HTML page"),
        ("folder", "it is a folder"),
        ("none/t.html", "its folder is not there"),
        ("x" * 300, "too long"),
        ("x" * 253, "too long"),
        ("a\0b", "null byte"),
    ],
)
def test_a_page_that_cannot_be_written_costs_nothing(tmp_path, name, told):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    trace = write_trace(tmp_path / "t.jsonl", plain_request())
    before = trace.read_bytes()
    with pytest.raises(ConfigError, match=f"cannot be written: .*{told}") as raised:
        write_trace_page(trace, tmp_path / name)
    assert "name another file" in str(raised.value)
    assert trace.read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_trace_that_cannot_be_read_leaves_the_page_as_it_was(tmp_path):
    (tmp_path / "t.html").write_text("<!doctype html>before")
    with pytest.raises(ConfigError, match="cannot be read"):
        write_trace_page(tmp_path / "none.jsonl", tmp_path / "t.html")
    trace = write_trace(tmp_path / "t.jsonl", plain_request())
    with pytest.raises(ModelError, match="no such folder"):
        write_trace_page(trace, tmp_path / "t.html", model="/models/none")
    assert (tmp_path / "t.html").read_text() == "<!doctype html>before"


def test_no_torch_is_needed(tmp_path):
    header = replace(HEADER, target={"name": "nobody/nothing"})
    trace = write_trace(tmp_path / "t.jsonl", plain_request(), header=header)
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path; from ddtree.bench.trace_view import write_trace_page\n"
        f"write_trace_page(Path({str(trace)!r}), Path({str(tmp_path / 't.html')!r}))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert "transformers is not installed" in (tmp_path / "t.html").read_text(encoding="utf-8")
