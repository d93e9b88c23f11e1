"""One measurement, in a process that does nothing else: ``python -m benchmarks.data.measure SETUP``."""

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import psutil
import uvloop

from asyncrl.config import DataConfig
from asyncrl.data import load_tokenizer
from asyncrl.data.streaming.opened import open_stream
from asyncrl.data.streaming.stream import PromptStream

LOOK_EVERY = 500
"""Prompts between two looks at the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of a measurement."""

    path: str
    checkpoint: str
    shuffle: bool
    workers: int
    prompts: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The figures of a file."""

    open_s: float
    """Seconds to open the stream, which reads the head of the file."""
    start_s: float
    """Seconds from there until a worker has loaded the tokenizer."""
    first_batch_s: float
    """Seconds of reading until the last prompt of the first batch."""
    first_mb: float
    """Resident memory of the process after the first batch, in MB."""
    most_mb: float
    """The largest resident memory."""
    prompts_per_s: float
    """Prompts per second after the first batch."""


def measure(setup: Setup) -> Measurement:
    """Open and take prompts."""
    checkpoint = Path(setup.checkpoint).absolute()
    tokenizer = load_tokenizer(checkpoint)
    data = DataConfig(
        prompt_data=(Path(setup.path),),
        label_key="label",
        rollout_shuffle=setup.shuffle,
        streaming_data=True,
        num_data_workers=setup.workers,
    )
    began = time.perf_counter()
    stream = open_stream(data, tokenizer, checkpoint)
    opened = time.perf_counter()
    return uvloop.run(_taken(stream, setup, opened - began))


async def _taken(stream: PromptStream, setup: Setup, open_s: float) -> Measurement:
    async with asyncio.TaskGroup() as tasks:
        began = time.perf_counter()
        reading = tasks.create_task(stream.run())
        await stream.started.wait()
        started = time.perf_counter()
        await _take(stream, setup.batch)
        first = time.perf_counter()
        first_mb = most_mb = _resident_mb()
        for _ in range(max(1, setup.prompts // LOOK_EVERY)):
            await _take(stream, LOOK_EVERY)
            most_mb = max(most_mb, _resident_mb())
        rate = max(1, setup.prompts // LOOK_EVERY) * LOOK_EVERY / (time.perf_counter() - first)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    return Measurement(
        open_s=open_s,
        start_s=started - began,
        first_batch_s=first - started,
        first_mb=first_mb,
        most_mb=most_mb,
        prompts_per_s=rate,
    )


async def _take(stream: PromptStream, count: int) -> None:
    for _ in range(count):
        await stream.ready()
        stream.take()


def _resident_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(asdict(measure(Setup(**orjson.loads(sys.argv[1]))))))
