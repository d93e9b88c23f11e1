"""The user's part of the runs: a witness of all trained prompts, and rewards that misbehave while a file is there."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from asyncrl.rewards.graders.number import last_number
from asyncrl.types import Prompt, Sample, ScoredGroup

WITNESS = "ASYNCRL_CHAOS_WITNESS"
"""Environment variable with the file to which ``trained`` adds a line for each step."""
MISBEHAVES = "ASYNCRL_CHAOS_REWARD"
"""Environment variable with the file that is there while the rewards misbehave."""
COMPUTES_S = 1.0


def trained(step: int, trained: tuple[ScoredGroup, ...], filtered: tuple[ScoredGroup, ...]) -> None:
    """Write the prompts of a step, before it is trained."""
    rows = [(group.prompt.epoch, group.prompt.row) for group in trained]
    line = orjson.dumps({"step": step, "trained": rows, "filtered": len(filtered)}) + b"\n"
    with Path(os.environ[WITNESS]).open("ab") as file:
        file.write(line)


def hung(prompt: Prompt, sample: Sample) -> float:
    """Never return while the file is there."""
    while _misbehaves():
        time.sleep(0.5)
    return _right(prompt, sample)


def slow(prompt: Prompt, sample: Sample) -> float:
    """Compute for a second while the file is there."""
    end = time.process_time() + COMPUTES_S
    while _misbehaves() and time.process_time() < end:
        sum(range(1000))
    return _right(prompt, sample)


async def serve(port: int) -> None:
    """Answer rewards over HTTP until cancelled."""
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        asked: dict[str, Any] = await request.json()
        return web.json_response(float(last_number(str(asked["response"])) == last_number(str(asked["label"]))))

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await asyncio.Event().wait()


def _misbehaves() -> bool:
    return os.path.exists(os.environ[MISBEHAVES])


def _right(prompt: Prompt, sample: Sample) -> float:
    return float(last_number(sample.text) == last_number(str(prompt.label)))


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
