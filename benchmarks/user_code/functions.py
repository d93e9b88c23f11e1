"""Episodes and a reward as users write them, in the process of user code.  A prompt names its function."""

import importlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.rollouts.native import Episode, EpisodeSettings
from asyncrl.rollouts.native_program import NativeProgram
from asyncrl.rollouts.testing import CharacterTokenizer
from asyncrl.rollouts.user_process.results import plain_rewards
from asyncrl.types import Prompt, Reward, Sample

BLOCK_S = 2.0
LEAK_BYTES = 1_000_000_000
LARGE = 150_000
"""Entries of the large result, which is 20 MB."""

_leaked: list[bytearray] = []


async def behaves(ep: Episode) -> None:
    for _ in range(4):
        turn = await ep.generate()
        ep.observe(turn.text[:8])
    ep.reward = 1.0


async def blocks(ep: Episode) -> None:
    await ep.generate()
    time.sleep(BLOCK_S)  # noqa: ASYNC251 (as users' files do)


async def computes(ep: Episode) -> None:
    await ep.generate()
    end = time.monotonic() + BLOCK_S
    while time.monotonic() < end:
        sum(range(1000))


async def leaks(ep: Episode) -> None:
    await ep.generate()
    _leaked.append(bytearray(os.urandom(1)) * LEAK_BYTES)


async def exits(ep: Episode) -> None:
    await ep.generate()
    _leaked.clear()
    os._exit(1)


async def imports(ep: Episode) -> None:
    for name in ("torch", "transformers", "sglang.srt.server_args", "ray"):
        importlib.import_module(name)
    await ep.generate()


async def answers_at_length(ep: Episode) -> None:
    await ep.generate()
    ep.metadata["large"] = [{"text": "x" * 100, "place": place} for place in range(LARGE)]


FUNCTIONS: dict[str, Callable[[Episode], Awaitable[Any]]] = {
    each.__name__: each for each in (behaves, blocks, computes, leaks, exits, imports, answers_at_length)
}


async def by_name(ep: Episode) -> None:
    await FUNCTIONS[ep.prompt](ep)


def episodes() -> NativeProgram:
    """Return the program of these functions."""
    return NativeProgram(by_name, EpisodeSettings(tokenizer=CharacterTokenizer()))


def rewards() -> Callable[[Prompt, tuple[Sample, ...]], Awaitable[Any]]:
    """Return the program of a reward that compares two texts."""

    async def program(prompt: Prompt, samples: tuple[Sample, ...]) -> Any:
        return plain_rewards([Reward(value=float(each.text == prompt.label)) for each in samples])

    return program
