"""Documents as Markdown and HTML: nothing from a file becomes markup."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ddtree.bench.document import (
    Document,
    Picture,
    Section,
    Table,
    Text,
    code,
    escaped,
    markdown_table,
    to_html,
    to_markdown,
)
from report_kit import NASTY_NAMES

# As strict as pages that show Markdown with raw HTML and links allowed.
LENIENT = MarkdownIt("commonmark", {"html": True}).enable("table")
ANY_TEXT = st.text(max_size=40) | st.text(alphabet="\\`*_[]()<>&|~$#!-+.1a \n", max_size=20)


def shown(text):
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@given(ANY_TEXT)
def test_a_text_is_shown_as_it_is(text):
    made = LENIENT.renderInline(f"a{escaped(text)}a")
    assert "<" not in made
    assert html.unescape(made) == f"a{shown(text)}a"


@given(ANY_TEXT)
def test_a_text_stays_in_its_cell(text):
    made = LENIENT.render(markdown_table(Table(("one", "two"), [[escaped(text) or "x", "end"]])))
    assert made.count("<td") == 2
    assert re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", made)[-1] == "end"


@given(ANY_TEXT)
def test_code_is_one_span(text):
    made = LENIENT.renderInline(code(text))
    assert re.fullmatch(r"<code>([^<]*)</code>", made)
    inside = html.unescape(made.removeprefix("<code>").removesuffix("</code>"))
    assert inside.strip() == shown(text).strip()


def test_a_long_text_is_cut():
    assert escaped("x" * 1000) == "x" * 300 + "…"


@pytest.mark.parametrize("name", ["mt_bench", "swe_bench_lite", "tree:64", "gsm8k"])
def test_usual_names_need_no_escape(name):
    assert escaped(name) == name


@pytest.fixture
def document():
    return Document(
        "Title <b>",
        "An *introduction*.",
        [
            Section(
                "One", [Text("A `b`.\n\n| a |\n| --- |\n| b |"), Table(("x", "y"), [["1", "**2**"]], "cap")]
            ),
            Section("Two", [Picture("p", "a plot", "what it shows", "<svg/>", b"png")], is_folded=True),
        ],
        {"A trace": "trace.html"},
    )


def test_markdown(document):
    made = to_markdown(document, ".svg", "images/")
    assert made.startswith("# Title <b>\n\nAn *introduction*.\n\n[A trace](trace.html)\n\n## One\n\nA `b`.")
    assert "**cap**\n\n| x | y |\n| --- | ---: |\n| 1 | **2** |" in made
    assert made.endswith("## Two\n\n![what it shows](images/p.svg)\n")


def test_html(document):
    made = to_html(document, "body { color: red }")
    assert "<title>Title &lt;b&gt;</title>" in made
    assert "<em>introduction</em>" in made
    assert made.count('<div class="table"') == made.count("<table>") == 2
    assert '<th scope="row" class="text">1</th><td><strong>2</strong></td>' in made
    assert (
        '<details><summary><h2>Two</h2></summary>\n<figure><img alt="what it shows" src="data:image/svg'
        in made
    )
    assert '<a href="#s2">Two</a>' in made
    assert '<a href="trace.html">A trace</a>' in made


@pytest.mark.parametrize("name", NASTY_NAMES)
def test_markdown_of_others_makes_no_links_and_no_html(name):
    made = to_html(Document("t", name, [Section(escaped(name) or "x", [Text(name)])]), "")
    body = made.split("<header>")[1]
    assert "<script" not in body
    assert "javascript:" not in "".join(re.findall(r'(?:href|src)="([^"]*)"', body))
    assert "<img" not in body
