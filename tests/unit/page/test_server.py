import asyncio
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable
from errno import EACCES
from http import HTTPStatus
from pathlib import Path

import aiohttp
import orjson
import pytest

from asyncrl.errors import ConfigError
from asyncrl.page.command import main
from asyncrl.page.runs.run_files import open_runs
from asyncrl.page.server import COOKIE, PageServer, as_json, cookie_of
from asyncrl.page.tabs.all_tabs import TABS
from tests.unit.page.made_runs import row, write_run, write_status

KEY = "secret"
LIMIT = aiohttp.ClientTimeout(total=60.0)
"""Limit for an answer that must not wait for anything."""
Body = Callable[[aiohttp.ClientSession], Awaitable[None]]


def visit(folders: list[Path], body: Body, *, has_key: bool = True) -> None:
    """Serve the runs, and call ``body`` with a client that has the key, or has none."""

    async def main() -> None:
        server = PageServer(open_runs(folders), key=KEY)
        async with server.open(socket.create_server(("127.0.0.1", 0))):
            base = server.url.partition("?")[0]
            jar = aiohttp.CookieJar(unsafe=True)  # of an address without a name
            async with aiohttp.ClientSession(base, cookie_jar=jar) as client:
                if has_key:
                    async with client.get(server.url) as answer:
                        assert answer.status == HTTPStatus.OK
                await body(client)

    asyncio.run(main())


def visit_alone(folders: list[Path], body: Body) -> None:
    """Serve the runs as ``visit`` does, without a request before ``body``."""

    async def main() -> None:
        server = PageServer(open_runs(folders), key=KEY)
        async with server.open(socket.create_server(("127.0.0.1", 0))):
            base = server.url.partition("?")[0]
            cookie = cookie_of(base.strip("/"))
            async with aiohttp.ClientSession(base, cookies={cookie: KEY}) as client:
                await body(client)

    asyncio.run(main())


async def text_of(client: aiohttp.ClientSession, path: str, status: int = HTTPStatus.OK) -> str:
    async with client.get(path) as answer:
        text = await answer.text()
        assert answer.status == status, text
        return text


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "one"), write_run(tmp_path / "two", 30, {"lr": 0.1}, reward__mean=0.5)]


@pytest.mark.parametrize("path", ["/", "/run/0/overview", "/plotly.js", "/static/page.js"])
def test_without_the_key_nothing_is_shown(runs: list[Path], path: str) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        assert "whole address" in await text_of(client, path, HTTPStatus.UNAUTHORIZED)
        await text_of(client, f"{path}?key=wrong", HTTPStatus.UNAUTHORIZED)

    visit(runs, body, has_key=False)


@pytest.mark.parametrize(
    ("path", "cookie"), [("/", b"\xff\xfe"), ("/?key=%ED%A0%80", b""), ("/", KEY.encode() + b"\xff")]
)
def test_a_key_that_is_no_text_is_wrong(runs: list[Path], path: str, cookie: bytes) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        base = client._base_url  # noqa: SLF001
        assert base is not None
        reader, writer = await asyncio.open_connection(base.host, base.port)
        writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\nCookie: {COOKIE}=".encode() + cookie + b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert b" 401 " in answer.splitlines()[0]
        assert b"whole address" in answer

    visit(runs, body, has_key=False)


def test_the_key_leaves_the_address(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        async with client.get(f"/run/0/overview?with=1&key={KEY}") as answer:
            assert str(answer.url).endswith("/run/0/overview?with=1")
        async with client.get("/run/0/overview") as answer:
            assert KEY not in await answer.text()

    visit(runs, body)


def test_two_pages_are_open_in_one_browser(runs: list[Path]) -> None:
    async def other(client: aiohttp.ClientSession) -> None:
        server = PageServer(open_runs(runs[1:]), key="another")
        async with server.open(socket.create_server(("127.0.0.1", 0))):
            async with client.get(server.url) as answer:  # sends the cookies of the first page, as a browser does
                assert "Overview of two" in await answer.text()
            assert "Overview of one" in await text_of(client, "/run/0/overview")

    visit(runs[:1], other)


def test_a_foreign_name_for_this_machine_is_refused(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        async with client.get("/run/0/overview", headers={"Host": "evil.example"}) as answer:
            assert answer.status == HTTPStatus.FORBIDDEN

    visit(runs, body)


def test_scripts_come_from_the_page_alone(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        async with client.get("/run/0/overview") as answer:
            assert "default-src 'none'; script-src 'self'" in answer.headers["Content-Security-Policy"]
            places = re.findall(r'(?:src|href)="([^"]*)"', await answer.text())
            assert places
            assert all(place.startswith(("/", "#", "?")) and not place.startswith("//") for place in places)

    visit(runs, body)


@pytest.mark.parametrize("tab", [tab.key for tab in TABS])
def test_every_tab_of_every_run_is_shown(runs: list[Path], tab: str) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        for number in range(len(runs)):
            assert 'aria-current="page"' in await text_of(client, f"/run/{number}/{tab}")

    visit(runs, body)


@pytest.mark.parametrize("tab", [tab.key for tab in TABS])
def test_every_tab_of_a_run_without_files_is_shown(tmp_path: Path, tab: str) -> None:
    (tmp_path / "versions.json").write_text("{}")

    async def body(client: aiohttp.ClientSession) -> None:
        await text_of(client, f"/run/0/{tab}")

    visit([tmp_path], body)


@pytest.mark.parametrize("path", ["/run/2/overview", "/run/-1/overview", "/run/x/overview", "/run/0/none", "/none"])
def test_a_page_that_does_not_exist_is_not_found(runs: list[Path], path: str) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        await text_of(client, path, HTTPStatus.NOT_FOUND)

    visit(runs, body)


def test_one_run_is_shown_at_once_and_several_are_listed(runs: list[Path]) -> None:
    async def one(client: aiohttp.ClientSession) -> None:
        assert "Overview of one" in await text_of(client, "/")

    async def both(client: aiohttp.ClientSession) -> None:
        text = await text_of(client, "/")
        assert "/run/1/overview" in text
        assert "Compare all" in text

    visit(runs[:1], one)
    visit(runs, both)


def test_a_browser_gets_a_frame_while_the_run_is_read(runs: list[Path]) -> None:
    server = PageServer(open_runs(runs[:1]), key=KEY)

    async def main() -> None:
        async with server.open(socket.create_server(("127.0.0.1", 0))):
            base = server.url.partition("?")[0]
            jar = aiohttp.CookieJar(unsafe=True)
            async with aiohttp.ClientSession(base, cookie_jar=jar) as client:
                opens = {"Sec-Fetch-Mode": "navigate"}
                try:
                    async with client.get(server.url, headers=opens, timeout=LIMIT) as answer:
                        frame = await answer.text()
                finally:
                    run.lock.release()
                assert "data-frame" in frame
                assert "Timeline" in frame
                assert "panel-1" not in frame
                assert "panel-1" in await text_of(client, "/run/0/overview")  # a script waits for the content
                run.is_read = True
                async with client.get("/run/0/overview", headers=opens) as answer:
                    assert "panel-1" in await answer.text()

    run = server._runs[0]  # noqa: SLF001
    run.lock.acquire()  # the reading at the start waits
    asyncio.run(main())


def test_the_first_answer_about_a_long_run_lacks_its_alarms(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", 1_200, response__truncated=1.0)

    async def body(client: aiohttp.ClientSession) -> None:
        async with client.get("/run/0/overview", headers={"X-First": "1"}) as answer:
            first = await answer.text()
        assert "data-more" in first
        assert "panel-1" in first
        whole = await text_of(client, "/run/0/overview")
        assert "data-more" not in whole
        assert "Answers do not end" in whole
        assert "Answers do not end" not in first

    visit_alone([folder], body)


def test_a_run_that_cannot_be_read_ahead_shows_why_when_it_is_opened(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("asyncrl.page.runs.rows.Rows.update", fail)

    async def body(client: aiohttp.ClientSession) -> None:
        text = await text_of(client, "/run/0/overview", HTTPStatus.INTERNAL_SERVER_ERROR)
        assert "the disk is gone" in text

    visit(runs, body)


def test_files_with_their_version_in_the_address_are_kept(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        places = re.findall(r'(?:src|href)="(/(?:static|plotly)[^"]*)"', await text_of(client, "/run/0/overview"))
        assert len(places) == 4
        for place in places:
            async with client.get(place) as answer:
                assert answer.status == HTTPStatus.OK
                assert "immutable" in answer.headers["Cache-Control"]
        async with client.get("/run/0/overview") as answer:
            assert "Cache-Control" not in answer.headers

    visit(runs, body)


def test_runs_are_compared(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        text = await text_of(client, "/run/0/overview?with=1")
        drawings = [orjson.loads(each) for each in re.findall(r'data-for="[^"]*">(.*?)</script>', text)]
        rewards = next(each for each in drawings if "one: training prompts" in str(each))
        assert [line["name"] for line in rewards["data"]] == ["one: training prompts", "two: training prompts"]
        assert rewards["data"][1]["y"] == [0.5] * 30

    visit(runs, body)


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write_run(tmp_path / parent / "run") for parent in ("one", "two")] + [write_run(tmp_path / "other")]
    assert [run.name for run in open_runs(folders)] == ["one/run", "two/run", "other"]
    monkeypatch.chdir(folders[0])
    assert [run.name for run in open_runs([Path(), Path("../../other"), Path("../run")])] == ["run", "other", "run"]
    assert [run.name for run in open_runs([Path(), folders[1]])] == ["one/run", "two/run"]


def test_a_run_that_is_named_twice_is_compared_once(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.page.server.ANSWER_S", 10.0)

    async def body(client: aiohttp.ClientSession) -> None:
        once = await text_of(client, "/run/0/overview?with=1")
        assert await text_of(client, "/run/0/overview?with=1&with=0&with=01&with=1") == once
        await text_of(client, "/run/1/overview")  # no request holds a lock for ever

    visit(runs, body)


def test_new_rows_appear_at_the_next_request(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        assert "20 of 40" in await text_of(client, "/run/0/overview")
        write_run(runs[0], 21)
        assert "21 of 40" in await text_of(client, "/run/0/overview")

    visit(runs, body)


def test_the_overview_of_a_resumed_run_has_its_steps_alone(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        assert "30 of 40" in await text_of(client, "/run/1/overview")
        with (runs[1] / "metrics.jsonl").open("ab") as file:
            file.writelines(orjson.dumps(row(step, time__step_s=7.0)) + b"\n" for step in (10, 11))
        text = await text_of(client, "/run/1/overview")
        assert "12 of 40" in text
        assert "0.310" in text  # the reward of step 11

    visit(runs, body)


def test_torn_lines_are_counted_on_the_overview(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        assert "Skipped" not in await text_of(client, "/run/0/overview")
        with (runs[0] / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 20, "rew\n')
        assert "1 line of metrics.jsonl cannot be read" in await text_of(client, "/run/0/overview")
        with (runs[0] / "metrics.jsonl").open("ab") as file:
            file.write(b"\0\0\n")
        assert "2 lines of metrics.jsonl cannot be read" in await text_of(client, "/run/0/overview")

    visit(runs, body)


def test_settings_are_shown_as_the_difference_to_another_run(runs: list[Path]) -> None:
    async def body(client: aiohttp.ClientSession) -> None:
        text = await text_of(client, "/run/0/configuration?with=1")
        assert "1 settings differ" in text
        assert ">lr<" in text
        assert ">num-rollout<" not in text
        assert ">num-rollout<" in await text_of(client, "/run/0/configuration?with=1&all=1")

    visit(runs, body)


def test_settings_of_an_earlier_run_in_the_folder_are_compared(runs: list[Path]) -> None:
    (runs[0] / "sums.1.toml").write_text("num-rollout = 10\n")

    async def body(client: aiohttp.ClientSession) -> None:
        assert "sums.1.toml" in await text_of(client, "/run/0/configuration")
        text = await text_of(client, "/run/0/configuration?earlier=sums.1.toml")
        assert re.search(r">num-rollout</th><td>40</td><td>10</td>", text)

    visit(runs, body)


def test_the_time_of_a_killed_run_ends_with_its_last_row(runs: list[Path]) -> None:
    began = time.time() - 5 * 86_400
    write_status(runs[0], host=socket.gethostname(), pid=2**22 + 1, began=began)
    os.utime(runs[0] / "metrics.jsonl", (began + 60, began + 60))

    async def body(client: aiohttp.ClientSession) -> None:
        text = await text_of(client, "/run/0/overview")
        assert "<dt>State</dt><dd>killed</dd>" in text
        assert "<dt>Time</dt><dd>1:00</dd>" in text

    visit(runs, body)


def test_the_reason_of_a_failed_run_is_shown_as_text(runs: list[Path]) -> None:
    write_status(runs[0], ended=1.0, exit_code=1, reason="TrainerFailed: <script>alert(1)</script>")

    async def body(client: aiohttp.ClientSession) -> None:
        text = await text_of(client, "/run/0/overview")
        assert "TrainerFailed: &lt;script&gt;" in text
        assert "<script>alert" not in text

    visit(runs, body)


def test_a_bug_in_a_tab_is_one_line(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: object) -> None:
        raise RuntimeError("<no>")

    monkeypatch.setattr("asyncrl.page.tabs.overview.alarms_of", fail)

    async def body(client: aiohttp.ClientSession) -> None:
        text = await text_of(client, "/run/0/overview", HTTPStatus.INTERNAL_SERVER_ERROR)
        assert "RuntimeError: &lt;no&gt;" in text

    visit(runs, body)


def test_json_cannot_end_its_script_element() -> None:
    text = as_json({"name": "</script><!-- &"})
    assert not set("<>&") & set(text)
    assert orjson.loads(str(text)) == {"name": "</script><!-- &"}


def test_a_run_of_another_user_is_one_line_about_it(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)  # as of a folder with the mode 0700; root reads those as well
    assert main([str(runs[0])]) == 2
    assert capsys.readouterr().err == f"error: {runs[0]} cannot be read: Permission denied\n"


@pytest.mark.parametrize(("name", "word"), [("none", "no such folder"), ("empty", "is no run directory")])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, name: str, word: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=word):
        open_runs([tmp_path / name])
