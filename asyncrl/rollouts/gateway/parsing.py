"""Tool calls and reasoning in answers, found by SGLang's parsers in a separate process.

Importing the parsers imports torch: 10 s of CPU time and 0.6 GB, which the controller has no room for.  The process
starts with the gateway if a parser is configured.  Requests and answers are lines of JSON, answered in order.
"""

import asyncio
import contextlib
import logging
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from asyncrl.errors import ServerFailed, plainly
from asyncrl.event_loop import Deadline
from asyncrl.rollouts.gateway.chats import ParsedAnswer, ToolCall
from asyncrl.task_groups import TaskGroup

logger = logging.getLogger(__name__)

START_S = 300.0
"""Limit for the import of SGLang, which takes minutes on a busy machine."""
PARSE_S = 20.0
"""Limit for one answer, which usually takes milliseconds.  A regular expression may take for ever on some text."""
WAIT_S = 60.0
"""Limit for a call, whose answer may wait behind others that hang."""
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

    A process that ends, or hangs in an answer, is replaced, and such an answer stays as it is.  ServerFailed ends the
    block if the new process does not start: without the parsers every episode would fail.
    """

    def __init__(self, command: Sequence[str], *, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
        """``command`` is followed by the names of both parsers; a missing one is an empty word."""
        self.has_tools = tool_call_parser is not None
        self.has_reasoning = reasoning_parser is not None
        self._command = (*command, tool_call_parser or "", reasoning_parser or "")
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._process: Process | None = None
        self._failure: ServerFailed | None = None

    async def __aenter__(self) -> "ParserProcess":
        self._stack = contextlib.AsyncExitStack()
        self._stack.push_async_callback(self._end)
        self._stack.enter_context(plainly())
        try:
            await self._start()
            tasks = await self._stack.enter_async_context(TaskGroup())
        except BaseException:
            await self._stack.aclose()
            raise
        serving = tasks.create_task(self._serve(), name="answer-parser")
        self._stack.callback(serving.cancel)
        return self

    async def __aexit__(self, *failure: Any) -> bool | None:
        return await self._stack.__aexit__(*failure)

    async def parse(self, text: str, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
        """See ``AnswerParser``.  An answer that is not parsed in time stays as it is.  Raises ServerFailed."""
        line = orjson.dumps({"text": text, "prompt_end": prompt_end, "tools": list(tools)})
        try:
            async with Deadline(WAIT_S):
                found = await self._ask(line)
        except TimeoutError:
            found = {"error": f"it waited for {WAIT_S:g} s behind others"}
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

    async def _ask(self, line: bytes) -> dict[str, Any]:
        if self._failure is not None:
            raise self._failure
        request = _Request(line=line, answer=asyncio.get_running_loop().create_future())
        self._requests.put_nowait(request)
        return await request.answer

    async def _serve(self) -> None:
        """Answer one request after another.  Raises ServerFailed."""
        request: _Request | None = None
        failure = ServerFailed("the answer parsers have ended")
        try:
            while True:
                request = await self._requests.get()
                if not request.answer.done():  # it may be cancelled
                    found = await self._found(request.line)
                    if not request.answer.done():
                        request.answer.set_result(found)
        except ServerFailed as error:
            failure = error
            raise
        finally:
            self._failure = failure
            self._fail(request, failure)
            while not self._requests.empty():
                self._fail(self._requests.get_nowait(), failure)

    def _fail(self, request: "_Request | None", error: ServerFailed) -> None:
        if request is not None and not request.answer.done():
            request.answer.set_exception(error)

    async def _found(self, line: bytes) -> dict[str, Any]:
        """Return what the process finds; an error if it ends twice, or hangs.  Raises ServerFailed."""
        problem = ""
        for _ in range(2):  # it may have ended before this request
            if self._process is None:
                await self._start()
            try:
                async with Deadline(PARSE_S):
                    return await self._exchange(line)
            except TimeoutError:
                problem = f"the parsers found nothing within {PARSE_S:g} s, and begin anew"
                await self._end()
                break
            except _BROKEN as error:
                problem = f"the process of the answer parsers {error}"
                await self._end()
        return {"error": problem}

    async def _exchange(self, line: bytes) -> dict[str, Any]:
        """Send a request and return its answer.  Raises an error of _BROKEN."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdin.is_closing():
            process.stdin.write(line + b"\n")
        answer = await process.stdout.readline()
        if not answer:
            raise EOFError(f"ended with code {await process.wait()}")
        found: dict[str, Any] = orjson.loads(answer)
        return found

    async def _start(self) -> None:
        """Start a process, and wait until it has imported the parsers.  Raises ServerFailed."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=_MOST_BYTES, start_new_session=True
            )
            async with Deadline(START_S):
                await self._exchange(orjson.dumps({"text": "", "prompt_end": "", "tools": []}))
        except TimeoutError as error:
            raise ServerFailed(
                f"the process of the answer parsers was not ready within {START_S:g} s: it imports SGLang"
            ) from error
        except _BROKEN as error:
            raise ServerFailed(f"the process of the answer parsers {error}") from error

    async def _end(self) -> None:
        """End the process.  No-op without one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A line of JSON, and its answer."""

    line: bytes
    answer: asyncio.Future[dict[str, Any]]


_BROKEN = (EOFError, OSError, ValueError)
"""Errors of an exchange with a process that has ended, or whose answers are no lines of JSON."""
