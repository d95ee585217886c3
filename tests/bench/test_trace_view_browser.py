"""The page of a trace in headless Chromium: real traces of a tiny pair whose words try to break it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: requirements/dev.lock has it")

from hypothesis import given, settings
from playwright.sync_api import BrowserContext, Page, expect

from ddtree.bench.trace_view import trace_page
from ddtree.bench.trace_view_data import round_fields
from ddtree.bench.trace_view_part import TracePart, read_part
from ddtree.bench.trace_view_text import TokenizerTexts
from ddtree.config import Mode
from ddtree.engine.request import Request
from ddtree.trace.record import TraceRecorder
from ddtree.trace.rounds import round_problems
from ddtree.trace_format import Detail
from server.browser_kit import CONTRASTS, NASTY, PROMPT, SAMPLING, Visit, page_engine, shown
from trace_view_kit import part_of, plain_request, rounds

pytest_plugins = ("server.browser_fixtures",)

PLANS = ((Mode.TREE, 16), (Mode.CHAIN, "auto"), (Mode.AR, "auto"))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracePart, TokenizerTexts]:
    """A trace of one prompt in three modes, and the texts of its tokens."""
    folder = tmp_path_factory.mktemp("trace")
    engine, _ = page_engine(folder / "target")
    prompt = tuple(PROMPT.encode())
    with TraceRecorder(folder / "t.jsonl", Detail.FULL) as recorder:
        for mode, budget in PLANS:
            recorder.generate(engine, Request(prompt, SAMPLING, mode, budget))
    return read_part(folder / "t.jsonl"), TokenizerTexts(engine.tokenizer)


def page_file(folder: Path, source: str) -> str:
    path = folder / "trace.html"
    path.write_text(source, encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def address(traced: tuple[TracePart, TokenizerTexts], tmp_path_factory: pytest.TempPathFactory) -> str:
    part, texts = traced
    return page_file(tmp_path_factory.mktemp("page"), trace_page(part, title="t.jsonl", texts=texts))


class TraceVisit(Visit):
    """A visit of a page that is a file: it asks for nothing but itself."""

    def open(self) -> Page:
        self.page.goto(self.url)
        return self.page

    def close(self) -> None:
        self.page.close()
        assert self.console == []
        assert {request.split("#")[0] for request in self.requests} == {self.url.split("#")[0]}


@pytest.fixture
def visit(browser: BrowserContext, address: str) -> Iterator[TraceVisit]:
    visit = TraceVisit(browser, address)
    yield visit
    visit.close()


def drawn(page: Page) -> dict[str, list[Any]]:
    """The drawing: number, kind and words of each node, and the kinds of edges."""
    return page.evaluate(
        """() => {
            const all = (selector) => [...document.querySelectorAll(`#canvas ${selector}`)];
            return {
                nodes: all(".node").map((node) => [node.dataset.node, node.classList[1]]),
                words: all(".node").map((node) => node.getAttribute("aria-label")),
                edges: all(".edge").map((edge) => edge.classList[1]),
            };
        }"""
    )


def test_every_round_is_shown_as_it_was(visit: TraceVisit, traced: tuple[TracePart, TokenizerTexts]) -> None:
    part, texts = traced
    request, page = part.trace.requests[0], visit.open()
    assert max(len(entry.accept_tokens) for entry in request.rounds) > 2
    total = 0
    for number, entry in enumerate(request.rounds, 1):
        expect(page.locator("#round-number")).to_have_text(f"{number} of {len(request.rounds)}")
        drawing, path = drawn(page), set(entry.accept_indices)
        kinds = ["root", *("path" if node in path else "wrong" for node in range(1, len(entry.tokens)))]
        assert drawing["nodes"] == [[str(i), kind] for i, kind in enumerate([*kinds, "bonus"])]
        assert sorted(drawing["edges"]) == sorted([*kinds[1:], "bonus"])
        for node, token in enumerate([*entry.tokens, entry.accept_tokens[-1]]):
            assert f"“{shown(texts.one(token))}”, token {token}" in drawing["words"][node]
        rows = page.locator("#path tbody tr")
        tokens = [row.split("\t")[2] for row in rows.all_inner_texts()]
        assert tokens == [str(token) for token in entry.accept_tokens]
        total += len(entry.accept_tokens)
        figures = page.locator("#figures dd").all_text_contents()
        assert figures[0].split()[0] == str(len(entry.accept_tokens))
        assert float(figures[1].removesuffix(" tokens")) == pytest.approx(total / number, abs=0.0051)
        assert figures[4] == f"{len(entry.tokens) - 1} of {entry.node_budget}"
        if number < len(request.rounds):
            page.keyboard.press("ArrowRight")
    expect(page.locator("#next")).to_be_disabled()


def test_the_text_grows_by_what_a_round_committed(
    visit: TraceVisit, traced: tuple[TracePart, TokenizerTexts]
) -> None:
    part, texts = traced
    request, page = part.trace.requests[0], visit.open()
    tame = {"\u202e": "\\u202e", "\x00": "\\u0", "\x07": "\\u7"}

    def tamed(text: str) -> str:
        return "".join(tame.get(sign, sign) for sign in text)

    begin = len(request.request.prompt_tokens)
    for entry in request.rounds:
        before = request.tokens[: entry.position - begin + 1]
        after = request.tokens[: entry.position - begin + 1 + len(entry.accept_tokens)]
        assert page.locator("#text").text_content() == tamed(texts.joined(after))
        news = page.locator("#text mark").text_content()
        assert news == tamed(texts.joined(after)[len(texts.joined(before)) :])
        page.click("#next") if entry is not request.rounds[-1] else None
    assert [
        nasty for nasty in NASTY if tamed(nasty) not in (page.locator("#text").text_content() or "")
    ] == []
    assert page.evaluate("() => typeof hacked") == "undefined"
    foreign = "#text :not(mark), #canvas :is(script, img, svg svg), #requests :is(script, img)"
    assert page.locator(foreign).count() == 0


def test_requests_by_search_click_and_keyboard(
    visit: TraceVisit, traced: tuple[TracePart, TokenizerTexts]
) -> None:
    page = visit.open()
    options = page.locator("#requests [role=option]")
    selected = page.locator("#requests [aria-selected=true]")
    expect(options).to_have_count(len(PLANS))
    page.focus("#requests")
    page.keyboard.press("ArrowDown")
    expect(selected).to_contain_text("r1")
    expect(page.locator("#figures")).to_contain_text("chain")
    expect(page.locator("#canvas .node")).to_have_count(9)
    options.nth(2).click()
    expect(page.locator("#caption")).to_have_text("No draft in this round: the target wrote one token.")
    expect(page.locator("#canvas .node")).to_have_count(2)
    page.fill("#search", "R0")
    expect(options).to_have_count(1)
    expect(page.locator("#requests-count")).to_have_text("1 of 3")
    page.keyboard.press("Enter")
    expect(page.locator("#figures")).to_contain_text("tree")
    page.fill("#search", "no such words")
    expect(options).to_have_count(0)
    page.keyboard.press("Enter")
    page.fill("#search", traced[1].joined(PROMPT.encode()).upper())
    expect(options).to_have_count(3)


def test_rounds_by_slider_chart_play_and_address(visit: TraceVisit) -> None:
    page = visit.open()
    number = page.locator("#round-number")
    page.focus("#round")
    page.keyboard.press("End")
    last = page.locator("#chart .bar").count()
    expect(number).to_have_text(f"{last} of {last}")
    page.locator("#chart .bar").nth(2).click()
    expect(number).to_contain_text("3 of")
    assert page.url.endswith("#request=1&round=3")
    expect(page.locator("#chart .shown title")).to_contain_text("round 3:")
    page.click("#previous")
    page.focus("#play")
    page.keyboard.press("Home")
    expect(number).to_contain_text("1 of")
    page.click("#play")
    expect(page.locator("#play")).to_have_text("Pause")
    expect(number).to_contain_text("2 of")
    page.click("#play")
    expect(page.locator("#play")).to_have_text("Play")
    for hash, expected in (("request=2&round=4", "4 of"), ("request=99&round=-3", "1 of"), ("x", "1 of")):
        page.evaluate("(hash) => { location.hash = hash; }", hash)
        expect(number).to_contain_text(expected)


def test_the_tree_is_walked_by_keyboard(visit: TraceVisit, traced: tuple[TracePart, TokenizerTexts]) -> None:
    rounds = traced[0].trace.requests[0].rounds
    at = next(index for index, entry in enumerate(rounds) if len(entry.accept_indices) > 2)
    visit.url += f"#request=1&round={at + 1}"
    page = visit.open()
    focused = "() => document.activeElement.dataset.node"
    page.focus('#canvas [tabindex="0"]')
    assert page.evaluate(focused) == "0"
    for node in (*rounds[at].accept_indices[1:], len(rounds[at].tokens)):
        page.keyboard.press("ArrowRight")
        assert page.evaluate(focused) == str(node)
        words = page.locator("#inspector").text_content()
        assert words == page.evaluate("() => document.activeElement.getAttribute('aria-label')")
        assert "Target: " in words
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) == str(rounds[at].accept_indices[-1])
    assert page.locator('#canvas [tabindex="0"]').count() == 1
    page.keyboard.press("PageDown")
    expect(page.locator("#round-number")).to_contain_text(f"{at + 2} of")
    assert page.evaluate(focused) == "0"
    wrong = page.locator("#canvas .node.wrong").first
    wrong.hover()
    expect(page.locator("#inspector")).to_contain_text("Wrong: ")
    expect(page.locator("#inspector")).to_contain_text("Drafter: ")


def test_any_tree_is_drawn_whole(visit: TraceVisit) -> None:
    """Every node once, the path as it was, no two nodes on one place, no child above or beside its parent."""
    page = visit.open()

    @settings(max_examples=15, deadline=None)
    @given(rounds(3, 5).filter(lambda entry: entry.tokens))
    def check(entry: Any) -> None:
        found = page.evaluate(
            """(round) => {
                const nodes = nodesOf(round);
                for (const node of nodes) node.words = "";
                drawTree(document.getElementById("canvas"), nodes, String, "");
                const boxes = [...document.querySelectorAll("#canvas .node")];
                const children = nodes.slice(1).map((node) => [node, nodes[node.parent]]);
                return {
                    drawn: boxes.map((box) => Number(box.dataset.node)),
                    path: nodes.filter((node) => node.kind === "path").map((node) => node.index),
                    parents: nodes.map((node) => node.parent),
                    places: new Set(nodes.map((node) => `${node.depth} ${node.middle}`)).size,
                    above: children.filter(([node, parent]) => node.middle < parent.middle).length,
                    beside: children.filter(([node, parent]) => node.x < parent.x + parent.width + 20).length,
                };
            }""",
            json.loads(json.dumps(round_fields(entry))),
        )
        count = len(entry.tokens) + 1
        assert found["drawn"] == list(range(count))
        assert found["path"] == sorted(entry.accept_indices[1:])
        assert found["parents"] == [*entry.parents, entry.accept_indices[-1]]
        assert (found["places"], found["above"], found["beside"]) == (count, 0, 0)

    check()


def other_page(browser: BrowserContext, folder: Path, *requests: Any) -> TraceVisit:
    return TraceVisit(browser, page_file(folder, trace_page(part_of(*requests), title="other")))


def test_a_summary_has_paths_and_says_how_to_get_trees(browser: BrowserContext, tmp_path: Path) -> None:
    visit = other_page(browser, tmp_path, plain_request())
    page = visit.open()
    expect(page.locator("#notes")).to_contain_text("--trace-detail full")
    expect(page.locator("#canvas")).to_contain_text("No tree was recorded")
    expect(page.locator("#path tbody tr")).to_have_count(2)
    expect(page.locator("#text")).to_have_text("#0 #1 #2")
    expect(page.locator(".requests")).to_be_hidden()
    visit.close()


def test_what_is_odd_is_told(browser: BrowserContext, tmp_path: Path) -> None:
    traced = plain_request("odd \ud800\u202e")
    first = replace(traced.rounds[0], tokens=(0, 1), parents=(-1, 5), log_probs=(0.0, -1.0))
    last = replace(traced.rounds[2], accept_tokens=(5, 6, 7), stages_ms={"verify": 3.0, "draft": 1.0})
    odd = traced._replace(rounds=(first, traced.rounds[1], last))
    assert list(round_problems((7, 8, 9), odd.tokens, odd.rounds)) != []
    visit = other_page(browser, tmp_path, odd, plain_request("none", 0))
    page = visit.open()
    expect(page.locator("#notes")).to_contain_text("In 1 request rounds do not fit together")
    expect(page.locator("#canvas")).to_contain_text("node 1 has the parent 5")
    expect(page.locator("#facts .alert")).to_contain_text("node 1 of its tree has the parent 5")
    page.keyboard.press("End")
    expect(page.locator("#caption")).to_contain_text("Not emitted, being behind the request's end: 1 token.")
    expect(page.locator("#path tr.past")).to_have_count(1)
    expect(page.locator("#stages li")).to_have_text(["draft 1.00 ms", "verify 3.00 ms"])
    page.locator("#requests [role=option]").nth(1).click()
    expect(page.locator("#round-number")).to_have_text("none")
    expect(page.locator("#tree-card")).to_be_hidden()
    expect(page.locator("#text")).to_have_text("#0")
    visit.close()


def test_a_trace_without_requests_says_so(browser: BrowserContext, tmp_path: Path) -> None:
    visit = other_page(browser, tmp_path)
    expect(visit.open().locator("#notes")).to_have_text("This trace has no requests.")
    visit.close()


@pytest.mark.parametrize("width", [320, 400])
def test_narrow_screens_do_not_scroll_sideways(visit: TraceVisit, width: int) -> None:
    page = visit.open()
    page.set_viewport_size({"width": width, "height": 800})
    for _ in range(6):
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        page.keyboard.press("ArrowRight")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(visit: TraceVisit, scheme: str) -> None:
    """Text against what it stands on: 4.5 to 1 is what WCAG 2.2 AA asks of small text."""
    page = visit.open()
    page.emulate_media(color_scheme=scheme)
    pairs = [
        ("#source", "body"),
        ("#requests em", ".card"),
        ("#requests small", "#requests [aria-selected=true]"),
        (".figures dt", ".figures div"),
        (".figures .lead dd", ".figures div"),
        (".legend li", ".card"),
        (".inspector", ".card"),
        ("th", ".card"),
        ("tr.bonus td", ".card"),
        ("#text", ".card"),
        ("#text mark", "#text mark"),
        (".facts dt", ".card"),
    ]
    ratios = page.evaluate(CONTRASTS, pairs)
    assert [pair for pair, ratio in zip(pairs, ratios, strict=True) if ratio < 4.5] == []


def test_every_control_has_a_name(visit: TraceVisit) -> None:
    nameless = visit.open().evaluate(
        """() => {
            const kinds = "input, button, summary, [tabindex], [role=tree], [role=listbox]";
            const named = (id) => document.getElementById(id)?.textContent;
            const label = (one) => one.ariaLabel || named(one.getAttribute("aria-labelledby"));
            const nameless = (one) => !(label(one) || one.textContent).trim();
            return [...document.querySelectorAll(kinds)].filter(nameless).map((one) => one.outerHTML);
        }"""
    )
    assert nameless == []
