"""The rate of engines with every slot taken all the time: no trainer, no updates, no waiting.

The slots start as they would be found in the middle of a long run.  Each has an answer drawn by its length (long ones
are more frequent there), at a random place in it; the part before is in the prompt.  When an answer ends, the next one
of the workload follows.  So KV caches are as full as in a long run, from the first second on.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise

from asyncrl.protocols import RolloutEngine
from asyncrl.types import Chunk, Request, SamplingParams, Weights
from benchmarks.sync_vs_async.workload import ForcedWorkload

DRAWN = 4096
"""Answers among which the first ones are drawn; the mean of the lengths is then right to some per cent."""
FIRST_S = 120.0
"""Seconds until the first token of every slot: half a million prompt tokens take an H200 some seconds."""

Track = list[tuple[float, int]]
"""Times, and the number of tokens of one answer that had arrived by each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One answer to generate."""

    prompt: tuple[int, ...]
    num_tokens: int
    """Tokens to generate."""


async def full_rate(
    engine: RolloutEngine, workload: ForcedWorkload, slots: int, group_size: int, weights: Weights, measured_s: float
) -> float:
    """Tokens per second of all engines together, over ``measured_s`` with ``slots`` answers in flight."""
    tracks: list[Track] = []
    clock, names = asyncio.get_running_loop().time, count()
    has_begun = asyncio.Semaphore(0)

    async def write(task: Task) -> None:
        track: Track = [(clock(), 0)]
        tracks.append(track)

        def arrived(chunk: Chunk) -> None:
            if len(track) == 1:
                has_begun.release()
            track.append((clock(), track[-1][1] + len(chunk.token_ids)))

        await engine.generate(request_of(task, next(names), weights), arrived)

    async def keep_writing(slot: int) -> None:
        await write(beginnings[slot])
        for task in following:
            await write(task)

    beginnings = list(islice(stationary(workload, group_size), slots))
    following = fresh(workload, group_size)
    async with asyncio.TaskGroup() as tasks:
        writers = [tasks.create_task(keep_writing(slot), name=f"full-{slot}") for slot in range(slots)]
        async with asyncio.timeout(FIRST_S):
            for _ in range(slots):
                await has_begun.acquire()
        start = clock()
        await asyncio.sleep(measured_s)
        stop = clock()
        for writer in writers:
            writer.cancel()
    return rate(tracks, slots, start, stop)


def rate(tracks: Sequence[Track], slots: int, start_s: float, stop_s: float) -> float:
    """Tokens per second of ``slots`` simultaneous answers at the speed of ``tracks`` between the two times.

    Tokens between two chunks count as evenly spread.  The time after the last chunk of an answer is unknown; it adds
    neither tokens nor seconds.  Raises ValueError if no answer has a chunk between the two times.
    """
    tokens = lives_s = 0.0
    for track in tracks:
        begin, end = max(track[0][0], start_s), min(track[-1][0], stop_s)
        if begin < end:
            tokens += progress(track, end) - progress(track, begin)
            lives_s += end - begin
    if not lives_s:
        raise ValueError(f"no answer has a chunk between {start_s:g} and {stop_s:g} s")
    return slots * tokens / lives_s


def progress(track: Track, at_s: float) -> float:
    """Tokens generated until ``at_s``, which must not precede the first entry."""
    for (before_s, before), (after_s, after) in pairwise(track):
        if before_s < after_s and at_s <= after_s:
            return before + (after - before) * (at_s - before_s) / (after_s - before_s)
    return float(track[-1][1])


def stationary(workload: ForcedWorkload, group_size: int) -> Iterator[Task]:
    """Answers as in the middle of a long run, endlessly."""
    draw = random.Random(f"{workload.seed}:full")
    lengths = [workload.length(place // group_size, place % group_size) for place in range(DRAWN)]
    for row in count():
        (length,) = draw.choices(lengths, weights=lengths)
        written = draw.randrange(length)
        rest = tuple(draw.choices(range(workload.vocabulary), k=written))
        yield Task(prompt=workload.prompt(row).token_ids + rest, num_tokens=length - written)


def fresh(workload: ForcedWorkload, group_size: int) -> Iterator[Task]:
    """Answers from their start, endlessly."""
    for place in count():
        row, index = divmod(place, group_size)
        yield Task(prompt=workload.prompt(row).token_ids, num_tokens=workload.length(row, index))


def request_of(task: Task, number: int, weights: Weights) -> Request:
    """The request for an answer; ``number`` is different for each."""
    return Request(
        request_id=f"full{number}",
        token_ids=task.prompt,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=task.num_tokens),
        seed=number,
        weights=weights,
    )
