"""Headless Chromium that visits the page of a run, and notes everything that it should not see."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, sync_playwright

from asyncrl.page.tabs.all_tabs import TABS

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)")
SCREENSHOTS = "ASYNCRL_SCREENSHOTS"
"""The variable with the folder in which tests leave pictures of what they saw."""
_WAIT_MS = 60_000


@dataclass(slots=True)
class Tab:
    """A tab of the browser."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Errors of scripts, lines of the console, answers above 399."""
    outside: list[str] = field(default_factory=list)
    """Addresses of other servers that were asked for."""

    def picture(self, name: str, *, is_whole: bool = False) -> None:
        """Leave a screenshot if the tests are told where."""
        if folder := os.environ.get(SCREENSHOTS):
            self.page.screenshot(path=Path(folder, f"{name}.png"), full_page=is_whole)

    def drawn(self) -> int:
        """Return the number of figures in sight, once all of them are drawn."""
        begun = "[...document.querySelectorAll('figure script[data-drawn]')]"
        self.until(f"{begun}.length > 0")
        self.until(f"{begun}.every((each) => document.querySelector(`#${{each.dataset.for}} svg.main-svg`))")
        return int(self.page.evaluate(f"{begun}.length"))

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true.  ``Page.wait_for_function`` would need unsafe scripts."""
        deadline = time.monotonic() + _WAIT_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(50)


@contextmanager
def open_tab(url: str) -> Iterator[Tab]:
    """Open ``url`` in a new browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=_WAIT_MS)
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(_WAIT_MS)
            tab = Tab(page)
            host = urlsplit(url).netloc
            page.on("console", lambda line: tab.errors.append(f"{line.type}: {line.text}"))
            page.on("pageerror", lambda error: tab.errors.append(str(error)))
            page.on("response", lambda answer: _note(tab, answer.url, answer.status, host))
            page.on("requestfailed", lambda request: _note_failure(tab, request.url, request.failure))
            page.goto(url)
            yield tab
        finally:
            browser.close()


def _note(tab: Tab, url: str, status: int, host: str) -> None:
    place = urlsplit(url)
    if place.scheme in {"http", "https", "ws", "wss"} and place.netloc != host:
        tab.outside.append(url)
    if status >= 400:
        tab.errors.append(f"{status}: {url}")


def _note_failure(tab: Tab, url: str, reason: str | None) -> None:
    if reason != "net::ERR_ABORTED":  # a page that is left ends its requests
        tab.errors.append(f"failed: {url}: {reason}")


def problems_of(url: str, run: str) -> list[str]:
    """Visit every tab of a run, and return everything that is wrong with them.  Without Chromium, nothing is."""
    if CHROMIUM is None:
        return []
    found = []
    with open_tab(url) as tab:
        for each in TABS:
            tab.page.get_by_role("navigation").get_by_role("link", name=each.title).click()
            if tab.page.get_by_role("heading", level=1).inner_text() != f"{each.title} of {run}":
                found.append(f"{each.title}: {tab.page.locator('main').inner_text()[:500]}")
            found += unlabelled(tab.page)
        return [*found, *tab.errors, *tab.outside]


def unlabelled(page: Page) -> list[str]:
    """Return the controls that a screen reader cannot name, and the tables without headings."""
    return list(
        page.evaluate(
            """() => {
              const named = (each) => each.getAttribute("aria-label") || each.labels?.length || each.textContent.trim()
                || each.getAttribute("title");
              const controls = [...document.querySelectorAll("a, button, input:not([type=hidden]), select, summary")]
                .filter((each) => !named(each));
              const tables = [...document.querySelectorAll("table")].filter((e) => !e.querySelector("th[scope]"));
              const figures = [...document.querySelectorAll(".drawing")].filter((e) => !e.getAttribute("aria-label"));
              return [...controls, ...tables, ...figures].map((each) => each.outerHTML.slice(0, 200));
            }"""
        )
    )


def focused_after_tab_key(page: Page, presses: int) -> list[str]:
    """Press the tab key, and return the text of each element that gets the focus."""
    found = []
    for _ in range(presses):
        page.keyboard.press("Tab")
        found.append(str(page.evaluate("document.activeElement.textContent.trim()")))
    return found
