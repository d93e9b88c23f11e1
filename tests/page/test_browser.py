"""The page of made-up runs in headless Chromium."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from playwright.sync_api import Route

from asyncrl.page.sample_index import index
from asyncrl.page.sample_index.step_files import read_columns
from asyncrl.page.tabs.all_tabs import TABS
from benchmarks.page import made_up_run
from tests.browser import focused_after_tab_key, needs_chromium, open_tab, unlabelled
from tests.unit.page.made_runs import write_run, write_status
from tests.unit.page.serving import served

pytestmark = [needs_chromium, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "one"), write_run(folder / "two", 30, {"lr": 0.1}, reward__mean=0.5)]
    write_status(runs[0])
    write_status(runs[1], ended=2e9, exit_code=0, reason="")
    return runs


def test_every_tab_opens_without_errors_and_without_the_internet(runs: list[Path]) -> None:
    with served(*runs) as url, open_tab(url) as tab:
        tab.page.get_by_role("link", name="one").click()
        for each in TABS:
            tab.page.get_by_role("navigation").get_by_role("link", name=each.title).click()
            assert tab.page.get_by_role("heading", level=1).inner_text() == f"{each.title} of one"
            assert unlabelled(tab.page) == []
            tab.picture(f"tab-{each.key}")
        assert tab.errors == []
        assert tab.outside == []


def test_figures_are_drawn_when_they_come_into_sight(runs: list[Path]) -> None:
    with served(runs[0]) as url, open_tab(url) as tab:
        tab.page.set_viewport_size({"width": 600, "height": 300})
        tab.page.reload()
        first = tab.drawn()
        tab.page.locator("figure").last.scroll_into_view_if_needed()
        tab.until(f"document.querySelectorAll('script[data-drawn]').length > {first}")
        assert tab.errors == []


def test_figures_stay_when_others_appear_before_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "live", 5)
    with served(folder) as url, open_tab(url) as tab:
        tab.drawn()
        last = tab.page.locator(".drawing").last
        place = last.get_attribute("id")
        last.evaluate("(each) => { each.stays = true; }")
        write_run(folder, 6, train__loss=0.1)
        tab.page.get_by_role("heading", name="Loss").wait_for()
        last = tab.page.locator(".drawing").last
        assert last.get_attribute("id") != place
        assert last.evaluate("(each) => each.stays")
        tab.until("[...document.querySelectorAll('.drawing')].at(-1).data[0].x.length === 6")
        tab.drawn()
        assert tab.errors == []


def test_staleness_is_filled_in_place_while_the_index_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_up_run.write_run(tmp_path / "indexed", range(60))
    may_go_on = Event()

    def slowly(run_dir: Path, step: int, columns: Sequence[str]) -> Any:
        if step < 30:
            assert may_go_on.wait(60)
        return read_columns(run_dir, step, columns)

    monkeypatch.setattr(index, "read_columns", slowly)
    monkeypatch.setattr(index, "_STEPS_AT_ONCE", 10)
    with served(folder) as url, open_tab(url) as tab:
        tab.page.get_by_role("navigation").get_by_role("link", name="Staleness").click()
        tab.page.get_by_text("30 of 60, newest first").wait_for()
        tab.drawn()
        tab.page.evaluate("window.stays = document.querySelector('.drawing')")
        may_go_on.set()
        tab.page.locator("dt:text-is('Steps in the index') + dd:text-is('60')").wait_for()
        tab.until("document.querySelector('.drawing').data[0].x.length === 60")
        assert tab.page.evaluate("window.stays === document.querySelector('.drawing')")
        assert tab.errors == []


def test_lines_are_sketched_before_plotly_is_there(runs: list[Path]) -> None:
    with served(runs[0]) as url, open_tab(url) as tab:
        tab.drawn()
        asked: list[Route] = []
        tab.page.context.route("**/plotly.js*", lambda route: asked.append(route))  # playwright needs a function
        tab.page.reload()
        tab.until("document.querySelectorAll('.drawing svg.sketch').length > 3")
        assert tab.page.locator(".drawing svg.main-svg").count() == 0
        tab.picture("sketched")
        while not asked:
            tab.page.wait_for_timeout(20)
        asked[0].continue_()
        tab.drawn()
        assert tab.page.locator(".drawing svg.sketch").count() == 0
        assert tab.errors == []


def test_runs_are_compared_by_a_form(runs: list[Path]) -> None:
    with served(*runs) as url, open_tab(url) as tab:
        tab.page.get_by_role("link", name="one").click()
        tab.page.get_by_label("two").check()
        tab.page.get_by_role("button", name="Show").click()
        tab.page.wait_for_url("**with=1**")
        tab.page.get_by_text("two: training prompts").first.wait_for()
        tab.picture("compared")
        assert tab.errors == []


def test_the_keyboard_reaches_content_and_tabs(runs: list[Path]) -> None:
    with served(runs[0]) as url, open_tab(url) as tab:
        reached = focused_after_tab_key(tab.page, 3 + len(TABS))
        assert reached[0] == "Skip to the content"
        assert [each.title for each in TABS] == reached[2 : 2 + len(TABS)]


def test_a_live_run_is_followed_without_loading_the_page_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "live", 5)
    with served(folder) as url, open_tab(url) as tab:
        tab.drawn()
        tab.page.evaluate("window.stays = true")
        write_run(folder, 6)
        tab.page.get_by_text("6 of 40").wait_for()
        assert tab.page.evaluate("window.stays")
        tab.until("document.querySelector('#panel-1').data[0].x.length === 6")
        assert tab.errors == []
