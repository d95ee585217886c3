"""The page at / in headless Chromium, on a server with a tiny engine whose words try to break it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: requirements/dev.lock has it")

from playwright.sync_api import BrowserContext, Page, Route, expect

from ddtree.config import Mode
from ddtree.engine.engine import Engine
from ddtree.engine.request import Request
from server.browser_kit import (
    CONTRASTS,
    MAX_TOKENS,
    NASTY,
    PROMPT,
    SAMPLING,
    PacedDrafter,
    Visit,
    ask,
    rounds_of,
    shown,
    text_of,
    wait_for,
)

pytest_plugins = ("server.browser_fixtures",)


def drawn(page: Page) -> dict[str, list[object]]:
    """The drawing: each node's kind, label and full text, and the edges of the path."""
    return page.evaluate(
        """() => ({
            kinds: [...document.querySelectorAll("#canvas .node")].map((n) => n.classList[1]),
            labels: [...document.querySelectorAll("#canvas text:not(.share)")].map((n) => n.textContent),
            titles: [...document.querySelectorAll("#canvas .node title")].map((n) => n.textContent),
            path: [...document.querySelectorAll("#canvas .edge.path")].length,
        })"""
    )


def test_text_is_the_apis(visit: Visit, url: str, tiny: tuple[Engine, PacedDrafter]) -> None:
    page = visit.generate()
    text = page.locator("#answer").text_content()
    prompt = tuple(tiny[0].tokenizer.encode(PROMPT))
    assert text == tiny[0].generate(Request(prompt, SAMPLING, Mode.AR)).text
    summary = ask(url)[-1]["ddtree"]
    assert page.locator("#accept-length").text_content() == f"{summary['accept_length']:.2f}"
    assert page.locator("#counts").text_content() == f"{MAX_TOKENS} / {summary['rounds']}"
    assert float(page.locator("#speed").text_content() or "") > 0
    expect(page.locator("#status")).to_have_text("Finished: the token limit was reached.")


def test_chat_prompt_is_a_message(visit: Visit) -> None:
    page = visit.open()
    page.uncheck("#raw")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#generate")
    body = asked.value.post_data_json
    assert body["messages"] == [{"role": "user", "content": PROMPT}]
    assert body["ddtree"] == {"mode": "tree", "budget": 16, "rounds": True}
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (1, 1, MAX_TOKENS)
    expect(page.locator("#status")).to_contain_text("Finished")


@pytest.mark.parametrize(("mode", "sent"), [("chain", {"mode": "chain"}), ("ar", {"mode": "ar"})])
def test_other_modes(visit: Visit, url: str, mode: str, sent: dict[str, str]) -> None:
    page = visit.open()
    page.check(f"input[value={mode}]", force=True)
    expect(page.locator("#budget")).to_be_disabled()
    expect(page.locator("#compare")).to_be_enabled(enabled=mode == "chain")
    with page.expect_request("**/v1/completions") as asked:
        page.keyboard.press("Control+Enter")
    assert asked.value.post_data_json["ddtree"] == sent | {"rounds": True}
    expect(page.locator("#status")).to_contain_text("Finished")
    assert page.locator("#answer").text_content() == text_of(ask(url, ddtree={"mode": "ar"}))
    assert len(drawn(page)["kinds"]) == (2 if mode == "ar" else 9)


def test_every_rounds_tree_is_drawn(visit: Visit, url: str) -> None:
    rounds = rounds_of(ask(url))
    page = visit.generate()
    assert max(len(round["accept_indices"]) for round in rounds) > 2
    for number in range(len(rounds), 0, -1):
        round, drawing = rounds[number - 1], drawn(page)
        expect(page.locator("#round-label")).to_contain_text(f"round {number} of {len(rounds)},")
        path = set(round["accept_indices"])
        assert drawing["kinds"] == [
            "root",
            *("path" if node in path else "draft" for node in range(1, len(round["nodes"]))),
            "bonus",
        ]
        assert drawing["path"] == len(path) - 1
        texts = [shown(node["text"]) for node in round["nodes"]]
        assert drawing["labels"][:-1] == [t if len(t) <= 14 else f"{t[:13]}…" for t in texts]
        assert all(text in title for text, title in zip(texts, drawing["titles"], strict=False))
        assert page.locator(f'#answer [data-round="{number - 1}"].shown').count() == 1
        if number > 1:
            page.click("#previous")
    expect(page.locator("#previous")).to_be_disabled()
    page.click("#next")
    expect(page.locator("#round-label")).to_contain_text("round 2 of")


def test_rounds_by_keyboard_click_and_bar(visit: Visit) -> None:
    page = visit.generate()
    label = page.locator("#round-label")
    page.focus("#round")
    page.keyboard.press("Home")
    expect(label).to_contain_text("round 1 of")
    page.keyboard.press("ArrowRight")
    expect(label).to_contain_text("round 2 of")
    page.click('#answer [data-round="3"]', position={"x": 2, "y": 6})
    expect(label).to_contain_text("round 4 of")
    page.locator("#bars rect").nth(1).click(force=True)
    expect(label).to_contain_text("round 2 of")
    page.focus("#round")
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    page.click("#play")
    expect(page.locator("#play")).to_have_text("Pause")
    expect(page.locator("#next")).to_be_disabled()
    expect(page.locator("#play")).to_have_text("Play")


def test_tree_follows_while_the_answer_is_written(visit: Visit, tiny: tuple[Engine, PacedDrafter]) -> None:
    page = visit.open()
    with tiny[1].held(after=3):
        page.click("#generate")
        expect(page.locator("#round-label")).to_contain_text("round 3 of 3,")
        expect(page.locator("#canvas .node.bonus")).to_have_count(1)
        expect(page.locator("#stop")).to_be_enabled()
        expect(page.locator("#generate")).to_be_disabled()
        expect(page.locator("#answer")).to_have_attribute("aria-busy", "true")
        expect(page.locator("#status")).to_have_text("Writing…")
    expect(page.locator("#status")).to_contain_text("Finished")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")


def test_markup_in_texts_is_inert(visit: Visit) -> None:
    page = visit.generate()
    text = page.locator("#answer").text_content() or ""
    assert [nasty for nasty in NASTY if nasty not in text] == []
    titles = "".join(map(str, drawn(page)["titles"]))
    page.click("#compare")
    expect(page.locator("#equal")).to_contain_text("same")
    assert page.evaluate("() => typeof hacked") == "undefined"
    foreign = "#answer > :not(span), #answer span *, #arms .text *, #canvas :is(script, img, svg svg)"
    assert page.locator(foreign).count() == 0
    assert "onerror" in text + titles


def test_white_space_is_visible(visit: Visit) -> None:
    visit.page.goto(visit.url)
    shown = visit.page.evaluate(
        """async () => (await import("/static/tree.js")).visible(" a\\n\\t\\u0000\\u202e\\u{1F332}") """
    )
    assert shown == "·a↵⇥\\u0\\u202e\N{EVERGREEN TREE}"


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_frees_the_engine(visit: Visit, tiny: tuple[Engine, PacedDrafter], how: str) -> None:
    engine, drafter = tiny
    page = visit.open()
    page.fill("#max-tokens", "400")
    begin, drafter.pause_s = drafter.draft_ct, 0.05
    try:
        with drafter.held(after=3):
            page.click("#generate")
            expect(page.locator('#answer [data-round="1"]')).to_be_visible()
            assert engine.lock.locked()
            page.click("#stop") if how == "button" else page.keyboard.press("Escape")
            expect(page.locator("#status")).to_have_text("Stopped.")
        wait_for(lambda: not engine.lock.locked(), "the engine to be free")
    finally:
        drafter.pause_s = 0.0
    # A whole answer takes more than 300 rounds: past MAX_TOKENS the drafter is hardly ever right.
    assert drafter.draft_ct - begin < 150
    expect(page.locator("#round")).to_be_enabled()
    page.fill("#max-tokens", "5")
    page.click("#generate")
    expect(page.locator("#status")).to_contain_text("Finished")


def test_comparison_with_equal_texts(visit: Visit, url: str) -> None:
    page = visit.open()
    page.click("#compare")
    expect(page.locator("#equal")).to_contain_text("Both texts are the same")
    text = text_of(ask(url))
    assert page.locator("#arms .text").all_text_contents() == [text, text]
    expect(page.locator("#ratio")).to_contain_text("one run")
    plain, tree = (float(speed.split()[0]) for speed in page.locator(".arm-speed").all_text_contents())
    ratio = float((page.locator("#ratio").text_content() or "").split()[0])
    # All three are rounded where they are shown.
    assert (tree - 0.05) / (plain + 0.05) - 0.005 <= ratio <= (tree + 0.05) / (plain - 0.05) + 0.005
    page.click("#compare")
    expect(page.locator("#ratio")).to_contain_text("median of 2 runs")
    page.fill("#seed", "2")
    page.click("#compare")
    expect(page.locator("#ratio")).to_contain_text("one run")


def test_comparison_with_texts_that_part(visit: Visit) -> None:
    def other(route: Route) -> None:
        body = route.request.post_data_json
        if body["ddtree"]["mode"] == "ar":
            body["seed"] = 2
        route.continue_(post_data=json.dumps(body))

    page = visit.open()
    page.route("**/v1/completions", other)
    page.click("#compare")
    expect(page.locator("#equal")).to_contain_text("The texts part after")
    plain, drafted = page.locator("#arms .text").all_text_contents()
    same = next(at for at, pair in enumerate(zip(plain, drafted, strict=False)) if pair[0] != pair[1])
    expect(page.locator("#equal")).to_contain_text(f"after {same} characters")
    assert page.locator("#arms mark").first.text_content() == plain[same:]


@pytest.fixture(scope="module")
def finished(browser: BrowserContext, url: str) -> Iterator[Page]:
    """A page with an answer in large trees and a comparison, to look at."""
    page = Visit(browser, url).open()
    page.fill("#budget", "127")
    page.click("#generate")
    expect(page.locator("#status")).to_contain_text("Finished")
    page.click("#compare")
    expect(page.locator("#equal")).to_contain_text("same")
    yield page
    page.close()


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screens_do_not_scroll_sideways(finished: Page, width: int) -> None:
    finished.set_viewport_size({"width": width, "height": 800})
    assert finished.locator("#canvas .node").count() > 32
    assert finished.evaluate("() => document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(finished: Page, scheme: str) -> None:
    """Text against what it stands on: 4.5 to 1 is what WCAG 2.2 AA asks of small text."""
    finished.emulate_media(color_scheme=scheme)
    pairs = [
        ("label[for=prompt]", ".request"),
        (".hint", ".request"),
        ("#prompt", "#prompt"),
        ("#generate", "#generate"),
        ("#status", ".answer"),
        ("#speed", ".figures div"),
        (".figures dt", ".figures div"),
        ("#answer", ".answer"),
        ("#caption", ".tree"),
        ("#caption code", "#caption code"),
        (".legend li", ".tree"),
        ("#error", "#error"),
        ("#ratio", ".compare"),
        (".arm-speed small", ".arm"),
        ("#model", "#model"),
    ]
    ratios = finished.evaluate(CONTRASTS, pairs)
    assert [pair for pair, ratio in zip(pairs, ratios, strict=True) if ratio < 4.5] == []


def test_every_control_has_a_name(finished: Page) -> None:
    nameless = finished.evaluate(
        """() => {
            const kinds = "input, textarea, button, [tabindex], [role=img]";
            const name = (one) => one.labels?.[0]?.textContent || one.ariaLabel || one.textContent;
            const nameless = [...document.querySelectorAll(kinds)].filter((one) => !name(one).trim());
            return nameless.map((one) => one.outerHTML);
        }"""
    )
    assert nameless == []


def test_places_of_nodes(visit: Visit) -> None:
    """No two nodes share a place, children stand beside or below their parents, edges do not cross."""
    visit.page.goto(visit.url)
    faults = visit.page.evaluate(
        """async () => {
            const { place } = await import("/static/tree.js");
            let seed = 7;
            const below = (limit) => (seed = (seed * 48271) % 2147483647) % limit;
            const faults = [];
            for (let run = 0; run < 200; run += 1) {
                const parents = [-1];
                const count = 2 + below(140);
                while (parents.length < count) parents.push(Math.max(0, parents.length - 1 - below(9)));
                const first = new Set(run % 2 ? [] : parents.map(() => below(parents.length)));
                const { depths, rows } = place(parents, first);
                const places = new Set(parents.map((_, node) => `${depths[node]} ${rows[node]}`));
                if (places.size !== parents.length) faults.push(["shared", parents]);
                for (let node = 1; node < parents.length; node += 1) {
                    const up = parents[node];
                    if (depths[node] !== depths[up] + 1) faults.push(["depth", parents]);
                    if (rows[node] < rows[up]) faults.push(["above", parents]);
                    for (let other = 1; other < node; other += 1) {
                        const over = parents[other];
                        if (depths[other] !== depths[node] || over === up) continue;
                        const cross = (rows[over] < rows[up]) !== (rows[other] < rows[node]);
                        if (cross) faults.push(["cross", parents]);
                    }
                }
            }
            return faults;
        }"""
    )
    assert faults == []


def test_page_files_are_sent_with_a_strict_policy(visit: Visit) -> None:
    answer = visit.page.goto(visit.url)
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    visit.open()
    static = Path(__file__).parents[2] / "src" / "ddtree" / "server" / "static"
    loaded = {Path(request).name for request in visit.requests if "/static/" in request}
    assert loaded == {file.name for file in static.iterdir()} - {"index.html"}
