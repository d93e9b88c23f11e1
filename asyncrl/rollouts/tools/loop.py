"""The loop of an episode with tools: generate, read the calls, run them, observe their results.

async def episode(ep):
    turn = await run_tools(ep, {"calculator": calculator})
    ep.reward = float(turn.text.removesuffix("<|im_end|>").strip() == ep.label)
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from asyncrl.daemon_threads import off_loop
from asyncrl.errors import SandboxFailed, ToolFailed, plainly
from asyncrl.rollouts.native import Conversation, Episode, ModelTurn
from asyncrl.rollouts.tools.calls import PARSERS, Parser, ToolCall, parser_of
from asyncrl.task_groups import TaskGroup

type Tools = Mapping[str, Callable[..., Any]]
"""Tools by the names that the model calls them.  Each takes the arguments of a call by name.

``async def`` runs on the event loop, ``def`` in a thread.  The result is text, or a value that is sent as JSON.
"""

type OnError = Literal["observe", "raise"]
"""``observe`` shows the error to the model.  ``raise`` ends the episode, which is then not trained.

A sandbox that could not run the program ends it in either case: the model would learn from a full disk.
"""


async def run_tools(
    ep: Episode,
    tools: Tools,
    *,
    parser: str | Parser = "hermes",
    on_error: OnError = "observe",
    timeout_s: float | None = None,
    max_concurrent: int = 8,
    max_turns: int | None = None,
    conversation: Conversation | None = None,
    **settings: Any,
) -> ModelTurn:
    """Let the model call tools until it answers without a call; return its last turn.

    The loop also ends with a turn that was cut by a limit, and after ``max_turns`` turns.  ``timeout_s`` is the limit
    of one call, ``--tool-timeout-s`` by default; ``settings`` are those of ``ep.generate``.  With ``on_error="raise"``
    it raises ToolFailed, also for a call that cannot be made.
    """
    read = await _parser(parser, ep.tools)
    agent, limit = conversation or ep, min(ep.max_turns, max_turns or ep.max_turns)
    for turns_left in range(limit - 1, -1, -1):
        turn = await agent.generate(**settings)
        calls = read(turn.text) if turn.finish == "stop" else []
        if not calls or turns_left == 0:
            break
        agent.observe(await call_tools(ep, tools, calls, on_error, timeout_s=timeout_s, max_concurrent=max_concurrent))
    return turn


async def call_tools(
    ep: Episode,
    tools: Tools,
    calls: Sequence[ToolCall],
    on_error: OnError = "observe",
    *,
    timeout_s: float | None = None,
    max_concurrent: int = 8,
) -> list[dict[str, Any]]:
    """Run calls, at most ``max_concurrent`` at once; return one message per call, in order.  Raises ToolFailed."""
    running = asyncio.Semaphore(max_concurrent)

    async def called(call: ToolCall) -> dict[str, Any]:
        async with running:
            try:
                content = await _called(ep, tools, call, timeout_s)
            except ToolFailed as error:
                if on_error == "raise" or isinstance(error.__cause__, SandboxFailed):
                    raise
                content = f"Error: {error}"
        return {"role": "tool", "name": call.name, "content": content}

    with plainly():
        async with TaskGroup() as group:
            tasks = [group.create_task(called(call)) for call in calls]
    return [task.result() for task in tasks]


async def _called(ep: Episode, tools: Tools, call: ToolCall, timeout_s: float | None) -> str:
    problem = call.error
    if problem is None and call.name not in tools:
        problem = f"there is no tool '{call.name}'; the tools are {', '.join(tools)}"
    if problem is not None:
        ep.num_tool_calls += 1
        ep.num_tool_errors += 1
        raise ToolFailed(problem)
    # Bound here, because the model chooses the names: ``timeout_s`` would be taken for the limit.
    result = await ep.call(partial(tools[call.name], **call.arguments), timeout_s=timeout_s)
    try:
        return result if isinstance(result, str) else json.dumps(result, default=str)
    except Exception as error:
        ep.num_tool_errors += 1
        raise ToolFailed(f"{call.name}: the result is not JSON: {type(error).__name__}: {error}") from error


async def _parser(parser: str | Parser, schemas: Sequence[Any]) -> Parser:
    if not isinstance(parser, str):
        return parser
    if parser in PARSERS:
        return parser_of(parser, schemas)
    return await off_loop(partial(parser_of, parser, schemas), "parser")  # the import of SGLang would block the loop
