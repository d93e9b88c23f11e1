"""Tool calls and reasoning in answers, found by SGLang's parsers in a separate process.

Importing the parsers imports torch: 10 s of CPU time and 0.6 GB, which the controller has no room for.  The process
starts with the gateway if a parser is configured.  Requests and answers are lines of JSON, answered in order.
"""

import asyncio
import contextlib
import logging
import uuid
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from asyncrl.errors import ServerFailed, plainly
from asyncrl.event_loop import Deadline
from asyncrl.rollouts.gateway.chats import ParsedAnswer, ToolCall
from asyncrl.task_groups import TaskGroup

logger = logging.getLogger(__name__)

START_S = 300.0
"""Limit for the import of SGLang, which takes minutes on a busy machine."""
_PARSE_S = 60.0
_MOST_BYTES = 1 << 26
"""Bytes of a line, at most; answers are far shorter."""


class AnswerParser(Protocol):
    """Finds tool calls and reasoning in the text of an answer."""

    @property
    def has_reasoning(self) -> bool:
        """Whether it finds reasoning."""

    @property
    def has_tools(self) -> bool:
        """Whether it finds tool calls."""

    async def parse(self, text: str, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
        """Parse an answer behind a prompt that ends with ``prompt_end``, which may open its reasoning."""


class NoParser:
    """Leaves answers as they are."""

    has_reasoning = False
    has_tools = False

    async def parse(self, text: str, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
        """See ``AnswerParser``."""
        return ParsedAnswer(content=text)


class ParserProcess:
    """An ``AnswerParser`` in a process.  ``async with`` starts and ends it.

    The end of the process ends the block with ServerFailed: without the parsers every episode would fail.
    """

    def __init__(self, command: Sequence[str], *, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
        """``command`` is followed by the names of both parsers; a missing one is an empty word."""
        self.has_tools = tool_call_parser is not None
        self.has_reasoning = reasoning_parser is not None
        self._command = (*command, tool_call_parser or "", reasoning_parser or "")
        self._waiting: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._failure: ServerFailed | None = None

    async def __aenter__(self) -> "ParserProcess":
        self._stack = contextlib.AsyncExitStack()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, limit=_MOST_BYTES, start_new_session=True
        )
        self._stack.enter_context(plainly())
        self._stack.push_async_callback(_end, self._process)
        try:
            tasks = await self._stack.enter_async_context(TaskGroup())
            reading = tasks.create_task(self._read(), name="answer-parser")
            self._stack.callback(reading.cancel)
            try:
                async with Deadline(START_S):
                    await self._ask({"text": "", "prompt_end": "", "tools": []})
            except TimeoutError as error:
                raise ServerFailed(
                    f"the process of the answer parsers was not ready within {START_S:g} s: it imports SGLang"
                ) from error
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *failure: Any) -> bool | None:
        return await self._stack.__aexit__(*failure)

    async def parse(self, text: str, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
        """See ``AnswerParser``.  Raises ServerFailed."""
        async with Deadline(_PARSE_S):
            found = await self._ask({"text": text, "prompt_end": prompt_end, "tools": list(tools)})
        if error := found.get("error"):
            logger.warning("an answer was not parsed: %s", error)
            return ParsedAnswer(content=text)
        calls = [
            ToolCall(
                id=call.get("id") or f"call_{uuid.uuid4().hex[:24]}", name=call["name"], arguments=call["arguments"]
            )
            for call in found["calls"]
        ]
        return ParsedAnswer(content=found["content"], reasoning=found["reasoning"] or None, tool_calls=tuple(calls))

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._failure is not None:
            raise self._failure
        line = orjson.dumps(request) + b"\n"  # first: a request that fails here gets no answer, so none may wait for it
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        return await answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = self._waiting.popleft()
            if not answer.done():  # its request was cancelled
                answer.set_result(orjson.loads(line))
        self._failure = ServerFailed(f"the process of the answer parsers ended with code {await self._process.wait()}")
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(self._failure)
        raise self._failure


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()
