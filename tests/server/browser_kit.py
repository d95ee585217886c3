"""A Chromium for tests of the page, and a tiny engine whose words try to break it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import BrowserContext, Page, expect
from torch import Tensor

from ddtree.config import SamplingParams
from ddtree.draft.context import DraftContext
from ddtree.engine.engine import Engine
from ddtree.layers.window import Window
from ddtree.server.app import create_app
from engine_kit import VOCAB_SIZE, ByteTokenizer, ScriptDrafter, plain, tiny_engine, tiny_target

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PROMPT = "How do trees grow?"
MAX_TOKENS = 40
SAMPLING = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=1)
# Markup that would set `hacked` if it were read as such, and texts that are hard to show or to lay out.
NASTY = (
    '<img src="x" onerror="hacked=1">',
    "<script>hacked=1</script>",
    "</textarea></title><svg onload=hacked=1>",
    "&lt;b&gt;&amp;",
    " \n\n ",
    "\t",
    "\N{EVERGREEN TREE}",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc",
    "\x00\x07",
    "wide" * 30,
)
# Contrast ratios of [text, ground] selectors, as WCAG 2.2 defines them.
CONTRASTS = """(pairs) => {
    const light = (color) => {
        const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const style = (selector) => getComputedStyle(document.querySelector(selector));
    return pairs.map(([text, ground]) => {
        const [a, b] = [light(style(text).color), light(style(ground).backgroundColor)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
}"""


def find_browser() -> str | None:
    """Path of a Chromium: what $CHROMIUM names, or the system's."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


class WordTokenizer(ByteTokenizer):
    """Reads bytes, and writes a word for each token: a nasty one for every second of the expected ones."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.words = [f" w{token}" for token in range(VOCAB_SIZE)]
        for token, word in zip(list(dict.fromkeys(expected))[::2], NASTY, strict=False):
            self.words[token] = word

    def decode(self, tokens: Sequence[int], **_options: bool) -> str:
        return "".join(self.words[token] for token in tokens)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.words[token]


class PacedDrafter(ScriptDrafter):
    """A scripted drafter that can be slow, or wait."""

    def __init__(self, script: Sequence[int], prompt_len: int) -> None:
        super().__init__(script, prompt_len)
        self.pause_s = 0.0
        self._free_drafts = 0
        self._open = threading.Event()
        self._open.set()

    @contextlib.contextmanager
    def held(self, after: int) -> Iterator[None]:
        """Inside, it makes that many drafts and then waits for the end of the block."""
        self._free_drafts = after
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def draft_logits(self, root_token: Tensor, context: DraftContext, window: Window) -> Tensor:
        time.sleep(self.pause_s)
        self._free_drafts -= 1
        if self._free_drafts < 0:
            self._open.wait(60)
        return super().draft_logits(root_token, context, window)


def page_engine(folder: Path) -> tuple[Engine, PacedDrafter]:
    """An engine that says nasty words to PROMPT, and whose drafter knows many of them before."""
    target = tiny_target(folder)
    prompt = tuple(PROMPT.encode())
    script = plain(target, SAMPLING, prompt).tokens
    drafter = PacedDrafter(script, len(prompt))
    engine = tiny_engine(target, drafter, max_context=512)
    engine.tokenizer = WordTokenizer(script)
    return engine, drafter


@contextlib.contextmanager
def serving(engine: Engine, api_key: str | None = None) -> Iterator[str]:
    """The address of a server of the engine, in a thread of this process."""
    app = create_app(engine, api_key=api_key)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, "the server to start")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def wait_for(is_true: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Return once it is true; fail if that takes too long."""
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, f"waited {limit_s:g} s for {what}"
        time.sleep(0.01)


def ask(url: str, **fields: Any) -> list[dict[str, Any]]:
    """Chunks of the completion of PROMPT that the page asks for, `fields` changed."""
    body = {
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": SAMPLING.temperature,
        "seed": SAMPLING.seed,
        "stream": True,
        "ddtree": {"mode": "tree", "budget": 16, "rounds": True},
    } | fields
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The answer's text."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def rounds_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answer's rounds."""
    return [chunk["ddtree"] for chunk in chunks if "round" in chunk.get("ddtree", {})]


def shown(text: str) -> str:
    """A token's text as the tree shows it."""
    signs = {" ": "·", "\n": "↵", "\t": "⇥", "\x00": "\\u0", "\x07": "\\u7", "\u202e": "\\u202e"}
    return "".join(signs.get(sign, sign) for sign in text)


def events(*chunks: dict[str, Any] | str) -> bytes:
    """A stream of events with those data."""
    texts = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


class Visit:
    """A page and what it did that it should not."""

    def __init__(self, browser: BrowserContext, url: str) -> None:
        self.page: Page = browser.new_page()
        self.console: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("dialog", lambda dialog: self.console.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = url

    def open(self) -> Page:
        """The page, set to what the drafter knows; budget and seed are the page's own."""
        page = self.page
        page.goto(self.url)
        expect(page.locator("#model")).to_have_text("tiny")
        page.fill("#prompt", PROMPT)
        page.check("#raw")
        page.fill("#max-tokens", str(MAX_TOKENS))
        page.fill("#temperature", str(SAMPLING.temperature))
        return page

    def generate(self) -> Page:
        page = self.open()
        page.click("#generate")
        expect(page.locator("#status")).to_contain_text("Finished")
        return page


class Ignoring(list[str]):
    """Console lines without those that Chromium itself writes of a failed request."""

    def __init__(self, expected: str) -> None:
        super().__init__()
        self.expected = expected

    def append(self, line: str) -> None:
        if not line.startswith(self.expected):
            super().append(line)
