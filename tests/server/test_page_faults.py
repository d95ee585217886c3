"""What the page shows when something goes wrong: refusals, a lost network, broken streams, a missing key."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: requirements/dev.lock has it")

from playwright.sync_api import BrowserContext, expect

from ddtree.engine.engine import Engine
from server.browser_kit import Ignoring, PacedDrafter, Visit, events, serving

pytest_plugins = ("server.browser_fixtures",)


PROMPTS = "**/v1/completions"


def refuse(visit: Visit, status: int, message: str, headers: dict[str, str] | None = None) -> None:
    """Let the server's answer to a prompt be that error."""
    body = json.dumps({"error": {"message": message}})
    visit.page.route(PROMPTS, lambda route: route.fulfill(status=status, body=body, headers=headers))
    expected = f"error: Failed to load resource: the server responded with a status of {status}"
    visit.console = Ignoring(expected)


def test_refusals_are_shown_until_it_works(visit: Visit) -> None:
    page = visit.open()
    for status, headers, shown in (
        (400, None, "400 Bad Request full"),
        (
            429,
            {"Retry-After": "7"},
            "429 Too Many Requests full (the server asks to try again after 7 s)",
        ),
        (500, None, "500 Internal Server Error full"),
    ):
        refuse(visit, status, "full", headers)
        page.click("#generate")
        expect(page.locator("#error")).to_have_text(shown)
        expect(page.locator("#status")).to_have_text("Not finished.")
        page.unroute(PROMPTS)
    page.click("#generate")
    expect(page.locator("#status")).to_contain_text("Finished")
    expect(page.locator("#error")).to_be_hidden()


def test_a_servers_own_refusal_is_shown(visit: Visit) -> None:
    page = visit.open()
    visit.console = Ignoring("error: Failed to load resource: the server responded with a status of 400")
    page.fill("#budget", "99999")
    page.click("#generate")
    expect(page.locator("#error")).to_contain_text("400 Bad Request")
    expect(page.locator("#error")).to_contain_text("99999")


def test_network_gone(visit: Visit) -> None:
    page = visit.open()
    visit.console = Ignoring("error: Failed to load resource: net::ERR_CONNECTION_REFUSED")
    page.route(PROMPTS, lambda route: route.abort("connectionrefused"))
    page.click("#generate")
    expect(page.locator("#error")).to_contain_text("The server cannot be reached")


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ((), "The connection ended early"),
        (({"error": {"message": "time is up"}},), "The server ended the answer time is up"),
    ],
)
def test_stream_that_breaks_off(visit: Visit, end: tuple[dict[str, object], ...], shown: str) -> None:
    page = visit.open()
    body = events({"choices": [{"text": "half"}]}, *end)
    page.route(PROMPTS, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.click("#generate")
    expect(page.locator("#error")).to_contain_text(shown)
    expect(page.locator("#answer")).to_have_text("half")
    expect(page.locator("#generate")).to_be_enabled()


def test_stream_cut_anywhere(visit: Visit) -> None:
    """One byte at a time, with each of the line ends that server-sent events may have."""
    text = "\N{LATIN SMALL LETTER E WITH ACUTE}\N{EVERGREEN TREE}\N{LINE SEPARATOR}end"
    chunk = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    stream = f": ping\n\nevent: x\nid: 1\ndata: {chunk}\n\ndata: [DONE]\n\n"
    visit.page.goto(visit.url)
    for newline in ("\n", "\r\n", "\r"):
        seen = visit.page.evaluate(
            """async (stream) => {
                const bytes = new TextEncoder().encode(stream);
                let at = 0;
                const oneByOne = new ReadableStream({
                    pull: (to) => (at < bytes.length ? to.enqueue(bytes.slice(at, ++at)) : to.close()),
                });
                window.fetch = async () => new Response(oneByOne);
                const seen = [];
                const api = await import("/static/api.js");
                await api.stream({}, "", undefined, (chunk) => seen.push(api.textOf(chunk)));
                return seen;
            }""",
            stream.replace("\n", newline),
        )
        assert seen == [text], repr(newline)


def test_key_is_kept_in_memory(browser: BrowserContext, tiny: tuple[Engine, PacedDrafter]) -> None:
    with serving(tiny[0], api_key="sesame") as url:
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("#error")).to_contain_text("401 Unauthorized")
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", "wrong")
        page.click("#generate")
        expect(page.locator("#error")).to_contain_text("401 Unauthorized")
        page.fill("#key", "sesame")
        page.fill("#max-tokens", "5")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#status")).to_contain_text("Finished")
        expect(page.locator("#model")).to_have_text("tiny")
        kept = page.evaluate(
            "() => JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        )
        assert "sesame" not in kept
        assert json.loads(kept)[:3] == [{}, {}, ""]
        page.reload()
        expect(page.locator("#key")).to_have_value("")
        page.close()
