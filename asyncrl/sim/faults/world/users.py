"""The user's code of a life: prompts, a reward and a filter that hang and raise."""

import asyncio

from asyncrl.engines.fake import FakePrompts
from asyncrl.sim.faults.world.plan import Setting, Weather
from asyncrl.sim.faults.world.tokens import PROMPT_TOKENS
from asyncrl.types import Prompt, Sample, ScoredGroup


class Prompts(FakePrompts):
    """Numbered prompts, each of PROMPT_TOKENS tokens."""

    def at(self, epoch: int, row: int) -> Prompt:
        """Return the prompt of one row in one epoch."""
        return Prompt(row=row, epoch=epoch, text=str(row), token_ids=(1 + row % 60,) * PROMPT_TOKENS, label=None)


class NoText:
    """A ``Tokenizer`` without text."""

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
        return []

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """See ``Tokenizer.decode``."""
        return ""


class UserCode:
    """A reward and a filter."""

    def __init__(self, setting: Setting, weather: Weather) -> None:
        self._rejected = setting.rejected
        self._weather = weather

    async def reward(self, prompt: Prompt, sample: Sample, /) -> float:
        """Return a reward, raise, or never return."""
        if self._weather.take("reward_raises"):
            raise ValueError("simulated")
        if self._weather.take("reward_hangs"):
            await asyncio.get_running_loop().create_future()
        if self._weather.lasting("reward_outage"):
            raise ConnectionRefusedError("simulated")
        await asyncio.sleep(0.001)
        return float(sum(sample.token_ids) % 2)

    def keep(self, group: ScoredGroup, /) -> str | None:
        """Keep or drop a group, or raise."""
        if self._weather.take("filter_raises"):
            raise ValueError("simulated")
        return "bad" if (group.prompt.row * 7 + group.prompt.epoch * 13) % 100 < self._rejected else None
