"""A long sample and one with tool calls, in headless Chromium."""

import time
from collections.abc import Iterator

import pytest

from tests.browser import Tab, needs_chromium, open_tab, unlabelled
from tests.page.made_samples import LONG_TOKENS, write_samples
from tests.unit.page.serving import served

pytestmark = [needs_chromium, pytest.mark.timeout(900)]

OPEN_S = 5.0
"""Limit for a page of 4,000 tokens on a busy machine; alone it takes 0.5 s."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    folder = tmp_path_factory.mktemp("samples") / "towers"
    write_samples(folder)
    with served(folder) as url, open_tab(url) as tab:
        yield tab
        assert tab.errors == []
        assert tab.outside == []


def open_group(tab: Tab) -> None:
    tab.page.get_by_role("navigation", name="Tabs").get_by_role("link", name="Samples").click()
    tab.page.get_by_role("rowheader", name="70").get_by_role("link").click()


def fits(tab: Tab) -> bool:
    """Whether nothing is wider than the window."""
    return bool(tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_a_group_of_a_long_sample_and_one_with_tools_fits_the_window(tab: Tab) -> None:
    open_group(tab)
    assert tab.page.locator(".card").count() == 2
    assert "characters are left out here" in tab.page.locator(".card .gap").inner_text()
    assert fits(tab)
    tab.picture("group-long-and-tools", is_whole=True)


def test_a_long_sample_is_read_page_by_page(tab: Tab) -> None:
    open_group(tab)
    began = time.monotonic()
    tab.page.get_by_role("link", name="Sample 0, token by token").click()
    tab.page.locator(".tokens .t").last.wait_for()
    assert time.monotonic() - began < OPEN_S
    tab.picture("sample-long")
    pages = tab.page.get_by_role("navigation", name="Pages of tokens").first.get_by_role("link")
    assert pages.count() == 8
    assert pages.nth(4).inner_text() == "16,000 to 19,999 (resumed, v6)"
    pages.nth(4).click()
    tab.page.wait_for_url("**page=4**")
    assert tab.page.locator(".mark").first.inner_text() == "resumed v6"
    pages.last.click()
    tab.page.wait_for_url("**page=7**")
    assert f"token {LONG_TOKENS - 1}," in str(tab.page.locator(".t[title]").last.get_attribute("title"))
    assert fits(tab)
    assert unlabelled(tab.page) == []
    tab.picture("sample-long-end")


def test_turns_and_the_answers_of_tools_are_told_apart(tab: Tab) -> None:
    open_group(tab)
    tab.page.get_by_role("link", name="Sample 1, token by token").click()
    tab.page.locator(".part").first.wait_for()
    kinds = tab.page.locator(".part").evaluate_all("(parts) => parts.map((each) => each.classList[1])")
    assert kinds == ["turn", "observation", "turn", "observation", "turn"]
    title = tab.page.locator(".part.turn h2").first.inner_text()
    assert title.startswith("Turn 1: ")
    assert title.endswith(" tokens, engine call 0, ended by stop")
    assert tab.page.locator("dt:text-is('Turns') + dd").inner_text() == "3"
    assert '"metres": 161.5' in tab.page.locator(".part.observation").first.inner_text()
    assert fits(tab)
    tab.picture("sample-tools", is_whole=True)
    tab.page.get_by_role("link", name="Show as a table with all numbers").click()
    tab.page.locator("table.numbers").first.wait_for()
    tab.picture("sample-tools-table")
    assert unlabelled(tab.page) == []
