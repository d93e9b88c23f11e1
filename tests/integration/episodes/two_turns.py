"""A native episode of two turns, with a tool in between, and an async reward; the integration tests train it."""

import asyncio

from asyncrl.rollouts.native import Episode
from asyncrl.types import Prompt, Sample


def last_word(text: str) -> str:
    return (text.split() or ["nothing"])[-1][:8]


async def episode(ep: Episode) -> None:
    turn = await ep.generate(max_new_tokens=12)
    seen = await ep.call(last_word, turn.text)
    ep.observe(f" so {seen} ")
    await asyncio.sleep(0)
    last = await ep.generate()
    turn.reward = 0.0
    ep.metadata["finish"] = last.finish
    ep.metadata["is_evaluation"] = ep.is_evaluation


async def reward(prompt: Prompt, sample: Sample) -> float:
    assert sample.metadata["is_evaluation"] == (sample.group_id is None)
    return float(str(prompt.label) in sample.text) + 0.01 * len(sample.text)
