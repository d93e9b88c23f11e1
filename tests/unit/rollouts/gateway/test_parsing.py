"""The process of the answer parsers."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.errors import ServerFailed
from asyncrl.rollouts.gateway import parsing
from asyncrl.rollouts.gateway.parsing import ParserProcess
from asyncrl.task_groups import TaskGroup

ECHO = """
import json, os, sys, time
if "ID" != "I" + "D":
    open("ID", "w").write(str(os.getpid()))
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "die":
        sys.exit(4)
    if text == "hang":
        time.sleep(60)
    print(json.dumps({"content": text, "reasoning": None, "calls": []}), flush=True)
"""


def parser(program: str) -> ParserProcess:
    return ParserProcess((sys.executable, "-c", program), tool_call_parser="any", reasoning_parser=None)


async def content(process: ParserProcess, text: str) -> str:
    return (await process.parse(text, "", ())).content


async def contents(process: ParserProcess, texts: Sequence[str]) -> list[str]:
    async with TaskGroup() as tasks:
        parsed = [tasks.create_task(content(process, text), name=text) for text in texts]
    return [each.result() for each in parsed]


def test_answers_are_parsed_in_order() -> None:
    async def main() -> list[str]:
        async with asyncio.timeout(20), parser(ECHO) as process:
            return [(await process.parse(text, "", ())).content for text in ("a", "b")]

    assert asyncio.run(main()) == ["a", "b"]


def test_a_request_that_json_does_not_have_shifts_no_answers() -> None:
    async def main() -> list[str]:
        async with asyncio.timeout(20), parser(ECHO) as process:
            with pytest.raises(TypeError):
                await process.parse("a", "", ({"parameters": {1, 2}},))
            async with asyncio.timeout(5):
                return [(await process.parse(text, "", ())).content for text in ("b", "c")]

    assert asyncio.run(main()) == ["b", "c"]


def test_a_process_that_ends_in_an_answer_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[str]:
        async with asyncio.timeout(20), parser(ECHO) as process:
            return await contents(process, ("a", "die", "b"))

    assert asyncio.run(main()) == ["a", "die", "b"]
    (record,) = caplog.records
    assert record.getMessage() == "an answer was not parsed: the process of the answer parsers ended with code 4"


def test_a_process_that_ended_between_two_answers_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[str]:
        async with asyncio.timeout(20), parser(ECHO.replace("ID", str(tmp_path / "id"))) as process:
            first = await content(process, "a")
            os.kill(int((tmp_path / "id").read_text()), signal.SIGKILL)
            return [first, await content(process, "b")]

    assert asyncio.run(main()) == ["a", "b"]
    assert not caplog.records


def test_a_process_that_hangs_in_an_answer_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parsing, "PARSE_S", 0.5)

    async def main() -> list[str]:
        async with asyncio.timeout(20), parser(ECHO) as process:
            return await contents(process, ("a", "hang", "b"))

    assert asyncio.run(main()) == ["a", "hang", "b"]
    (record,) = caplog.records
    assert "the parsers found nothing within 0.5 s" in record.getMessage()


def test_an_answer_does_not_wait_long_behind_others_that_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parsing, "WAIT_S", 0.5)

    async def main() -> list[str]:
        async with asyncio.timeout(20), parser(ECHO) as process:
            return await contents(process, ("hang", "a"))

    assert asyncio.run(main()) == ["hang", "a"]
    assert len(caplog.records) == 2
    assert {"waited for 0.5 s behind others" in record.getMessage() for record in caplog.records} == {True}


def test_a_call_after_the_end_is_refused() -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            async with parser(ECHO) as process:
                assert await content(process, "a") == "a"
            await process.parse("b", "", ())

    with pytest.raises(ServerFailed, match="the answer parsers have ended"):
        asyncio.run(main())


def test_a_process_that_does_not_start_again_ends_the_run(tmp_path: Path) -> None:
    once = f"import pathlib; pathlib.Path({str(tmp_path / 'started')!r}).mkdir()\n"  # fails the second time

    async def main() -> None:
        async with asyncio.timeout(20), parser(once + ECHO) as process, TaskGroup() as tasks:
            for text in ("die", "b"):
                tasks.create_task(refused(process, text), name=text)

    async def refused(process: ParserProcess, text: str) -> None:
        with pytest.raises(ServerFailed):
            await process.parse(text, "", ())
        refusals.append(text)

    refusals: list[str] = []

    with pytest.raises(ServerFailed, match="the process of the answer parsers ended with code 1"):
        asyncio.run(main())
    assert refusals == ["die", "b"]


def test_a_process_that_does_not_start_is_named() -> None:
    async def main() -> None:
        async with asyncio.timeout(20), parser("raise SystemExit(3)"):
            raise AssertionError

    with pytest.raises(ServerFailed, match="the process of the answer parsers ended with code 3"):
        asyncio.run(main())


def test_a_process_that_is_not_ready_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "START_S", 0.3)

    async def main() -> None:
        async with asyncio.timeout(20), parser("import time; time.sleep(60)"):
            raise AssertionError

    with pytest.raises(ServerFailed, match=r"the process of the answer parsers was not ready within 0\.3 s"):
        asyncio.run(main())
