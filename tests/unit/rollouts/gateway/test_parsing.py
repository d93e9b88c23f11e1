"""The process of the answer parsers."""

import asyncio
import sys

import pytest

from asyncrl.errors import ServerFailed
from asyncrl.rollouts.gateway import parsing
from asyncrl.rollouts.gateway.parsing import ParserProcess

ECHO = """
import json, sys
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "die":
        sys.exit(4)
    print(json.dumps({"content": text, "reasoning": None, "calls": []}), flush=True)
"""


def parser(program: str) -> ParserProcess:
    return ParserProcess((sys.executable, "-c", program), tool_call_parser="any", reasoning_parser=None)


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


def test_the_end_of_the_process_ends_the_run() -> None:
    async def main() -> None:
        async with asyncio.timeout(20), parser(ECHO) as process:
            with pytest.raises(ServerFailed, match="ended with code 4"):
                await process.parse("die", "", ())
            await asyncio.sleep(60)

    with pytest.raises(ServerFailed, match="the process of the answer parsers ended with code 4"):
        asyncio.run(main())


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
