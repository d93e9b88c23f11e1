"""Prompts, samples and rewards for the tests of this folder."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.rewards.resources import RewardResources, RewardSettings
from asyncrl.types import FinishReason, Prompt, Sample, Span, Weights


def prompt(label: Any = "7", text: str = "a question", **metadata: Any) -> Prompt:
    return Prompt(row=3, epoch=0, text=text, token_ids=(1,), label=label, metadata=metadata)


def sample(text: str, index: int = 0, token_ids: tuple[int, ...] = ()) -> Sample:
    spans = (Span(weights=Weights(version=0, step=0), start=0, stop=len(token_ids)),) if token_ids else ()
    return Sample(
        index=index,
        token_ids=token_ids,
        logprobs=array("f", [0.0] * len(token_ids)),
        spans=spans,
        text=text,
        finish=FinishReason.STOP,
        seconds=0.0,
    )


def settings(**changes: Any) -> RewardSettings:
    limits: dict[str, Any] = {
        "num_workers": 1,
        "memory_gb": 4.0,
        "timeout_s": 30.0,
        "start_timeout_s": 120.0,
        "rm_concurrency": 4,
        "preload": (),
    }
    return RewardSettings(**limits | changes)


def in_a_run[T](call: Callable[[RewardResources], Awaitable[T]], **changes: Any) -> T:
    """Run ``call`` with the resources of a run."""

    async def main() -> T:
        async with RewardResources(settings(**changes)) as resources:
            return await call(resources)

    return asyncio.run(main())
