"""Fixtures of the page's tests: one tiny engine, server and browser a module, one visit a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, expect, sync_playwright

from ddtree.engine.engine import Engine
from server.browser_kit import BROWSER_ARGS, PacedDrafter, Visit, find_browser, page_engine, serving


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, PacedDrafter]:
    return page_engine(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def url(tiny: tuple[Engine, PacedDrafter]) -> Iterator[str]:
    with serving(tiny[0]) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: install chromium, or name one in $CHROMIUM")
    expect.set_options(timeout=30_000)  # milliseconds until a test fails, for busy machines
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=BROWSER_ARGS)
        yield chromium.new_context()
        chromium.close()


@pytest.fixture
def visit(browser: BrowserContext, url: str) -> Iterator[Visit]:
    """A visit after which the console is empty and nothing went to another origin."""
    visit = Visit(browser, url)
    yield visit
    visit.page.close()
    assert visit.console == []
    assert {request for request in visit.requests if not request.startswith(f"{url}/")} == set()
