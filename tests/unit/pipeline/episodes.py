"""Episode functions for tests: turns, observations, tools."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncrl.episodes import EpisodeEnd, EpisodeOutcome, EpisodeStart, EpisodeTurns, GeneratedTurn, Trajectory
from asyncrl.types import FinishReason, Reward, Sample, Span, Turn

type Part = GeneratedTurn | tuple[int, ...]
"""A turn, or the tokens of an observation."""


def response(parts: Sequence[Part]) -> tuple[int, ...]:
    """The response tokens of a trajectory."""
    return tuple(token for part in parts for token in (part if isinstance(part, tuple) else part.token_ids))


def trajectory(
    prompt: tuple[int, ...], parts: Sequence[Part], *, left_out: Sequence[int] = (), reward: float | None = None
) -> Trajectory:
    """A trajectory of turns and observations in order; the calls ``left_out`` are not in the loss."""
    logprobs, mask = array("f"), list[int]()
    spans, turns = list[Span](), list[Turn]()
    for part in parts:
        start = len(mask)
        if isinstance(part, tuple):
            logprobs.extend([0.0] * len(part))
            mask += [0] * len(part)
            continue
        logprobs.extend(part.logprobs)
        mask += [int(part.call not in left_out)] * len(part.token_ids)
        spans += (replace(span, start=start + span.start, stop=start + span.stop) for span in part.spans)
        turns.append(Turn(call=part.call, start=start, stop=len(mask), finish=part.finish))
    token_ids = response(parts)
    sample = Sample(
        index=0,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=tuple(spans),
        text=" ".join(map(str, token_ids)),
        finish=turns[-1].finish if turns else FinishReason.STOP,
        seconds=1.0,
        turns=tuple(turns),
        prompt_ids=prompt,
    )
    return Trajectory(sample=sample, loss_mask=tuple(mask), reward=None if reward is None else Reward(value=reward))


class ToolUser:
    """An episode of ``turns`` turns with an observation between two, which takes ``tool_s`` seconds of the episode."""

    def __init__(self, turns: int = 3, tool_s: Any = 0.1, *, observed: tuple[int, ...] = (7, 8)) -> None:
        self.turns = turns
        self.tool_s = tool_s if callable(tool_s) else lambda start, turn: tool_s
        self.observed = observed
        self.starts: list[EpisodeStart] = []

    async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        """See ``EpisodeFn``."""
        self.starts.append(start)
        parts, tool_s = list[Part](), 0.0
        for number in range(self.turns):
            if number:
                seconds = self.tool_s(start, number)
                await asyncio.sleep(seconds)
                tool_s += seconds
                parts.append(self.observed)
            parts.append(await turns.generate(start.prompt.token_ids + response(parts), start.sampling))
        return EpisodeOutcome(
            trajectories=(trajectory(start.prompt.token_ids, parts),), end=EpisodeEnd.FINISHED, tool_s=tool_s
        )
