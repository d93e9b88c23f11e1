"""Prompts, samples and rewards for the tests of this folder."""

import asyncio
import tempfile
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from asyncrl.app.user_code import UserCode
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


def in_a_run[T](
    call: Callable[[RewardResources], Awaitable[T]], user_code: UserCode | None = None, **changes: Any
) -> T:
    """Run ``call`` with the resources of a run, and with the processes of ``user_code``."""

    async def main() -> T:
        code = user_code or UserCode(start_timeout_s=60.0)
        with tempfile.TemporaryDirectory() as logs:
            async with (
                code.running(1, Path(logs)) as processes,
                RewardResources(settings(**changes), user_code=processes) as resources,
            ):
                return await call(resources)

    return asyncio.run(main())
