"""Programs that misbehave, for the processes of these tests.  Prompts name the function."""

import asyncio
import enum
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.errors import EpisodeEnded, PluginError
from asyncrl.rollouts.interfaces import EpisodeCall, SlimeResult
from asyncrl.rollouts.native import Episode, EpisodeSettings
from asyncrl.rollouts.native_program import NativeProgram
from asyncrl.rollouts.session import Verdict
from asyncrl.rollouts.testing import CharacterTokenizer
from asyncrl.rollouts.user_process.results import plain_rewards
from asyncrl.types import Prompt, Reward, Sample

MARKS = "MARKS_FOLDER"
"""Environment variable with a folder in which functions leave files."""


def mark(name: str) -> None:
    (Path(os.environ[MARKS]) / name).touch()


async def two_turns(ep: Episode) -> None:
    turn = await ep.generate(stop=("</call>",), max_new_tokens=20)
    ep.observe(f"[{turn.text}]")
    await ep.generate()
    ep.metadata["seen"] = {turn.call}
    ep.metadata["client"] = object()
    ep.reward = len(turn.token_ids)


async def without_end(ep: Episode) -> None:
    while True:
        await ep.generate()
        ep.observe("x")


async def raising(ep: Episode) -> None:
    await ep.generate()
    raise KeyError("no such tool")


async def keyless(ep: Episode) -> None:
    await ep.generate()
    ep.reward = {"right": 1.0}


async def leaving(ep: Episode) -> None:
    raise SystemExit(3)


async def dying_with_a_daemon(ep: Episode) -> None:
    daemon = subprocess.Popen(["sleep", "986"], start_new_session=True)  # noqa: ASYNC220 (as users' files do)
    (Path(os.environ[MARKS]) / "daemon").write_text(str(daemon.pid))
    os._exit(7)


async def dying(ep: Episode) -> None:
    os._exit(7)


async def killed(ep: Episode) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def slow(ep: Episode) -> None:
    mark(f"started-{ep.index}")
    try:
        await ep.generate()
        await asyncio.sleep(60.0)
    finally:
        await asyncio.sleep(0.01)
        mark(f"finally-{ep.index}")


async def stubborn(ep: Episode) -> None:
    await ep.generate()
    mark("stubborn")
    while True:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            try:
                await ep.generate()
            except EpisodeEnded as error:
                mark(f"refused-{error.reason}")
            mark("cancelled")
            return


async def persistent(ep: Episode) -> None:
    mark("persistent")
    while True:
        with suppress(EpisodeEnded, asyncio.CancelledError):
            await ep.generate()


async def impatient(ep: Episode) -> None:
    try:
        async with asyncio.timeout(0.05):
            await ep.generate()
    except TimeoutError:
        mark("gave-up")
    await ep.generate()


async def blocking(ep: Episode) -> None:
    await ep.generate()
    time.sleep(float(str(ep.label or 2.0)))  # noqa: ASYNC251 (as users' files do)


async def hung_in_a_thread(ep: Episode) -> None:
    await asyncio.to_thread(threading.Event().wait)


async def large(ep: Episode) -> None:
    await ep.generate()
    ep.metadata["large"] = [{"text": "x" * 100, "place": place} for place in range(int(str(ep.label or 0)))]


async def importing(ep: Episode) -> None:
    import importlib

    for name in ("numpy", "psutil", "orjson", "jinja2", "http.server", "xml.dom", "sqlite3", "email"):
        importlib.import_module(name)
    await ep.generate()


FUNCTIONS: dict[str, Callable[[Episode], Awaitable[Any]]] = {
    each.__name__: each
    for each in (
        two_turns,
        without_end,
        raising,
        keyless,
        leaving,
        dying,
        dying_with_a_daemon,
        killed,
        slow,
        stubborn,
        persistent,
        impatient,
        blocking,
        hung_in_a_thread,
        large,
        importing,
    )
}


async def by_name(ep: Episode) -> None:
    await FUNCTIONS[ep.prompt](ep)


def native() -> NativeProgram:
    return NativeProgram(by_name, EpisodeSettings(tokenizer=CharacterTokenizer(), max_turns=3))


class Status(enum.Enum):
    DONE = "done"


def slimes() -> Callable[[EpisodeCall], Awaitable[SlimeResult]]:
    async def program(call: EpisodeCall) -> SlimeResult:
        turn = await call.generate(call.start.prompt.token_ids)
        sample = {"tokens": list(turn.token_ids) * 20, "status": Status.DONE, "mask": (1, 0), "lock": asyncio.Lock()}
        return SlimeResult(samples=(sample,), is_list=False)

    return program


def rewards() -> Callable[[Prompt, tuple[Sample, ...]], Awaitable[Any]]:
    async def program(prompt: Prompt, samples: tuple[Sample, ...]) -> Any:
        if prompt.text == "dies":
            os._exit(1)
        if prompt.text == "raises":
            raise ZeroDivisionError("of nothing")
        return plain_rewards([Reward(value=float(len(each.text)), parts={"by": os.getpid()}) for each in samples])

    return program


def nothing() -> Callable[[EpisodeCall], Awaitable[Verdict]]:
    raise PluginError("has no function 'nothing'")


def ends_at_import() -> Any:
    os._exit(9)


def hangs_at_import() -> Any:
    time.sleep(60.0)


def raises_at_import() -> Any:
    raise OSError("the disk is full")
