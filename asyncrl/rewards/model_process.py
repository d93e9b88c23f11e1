"""A reward model of the user: an object in a process that lives as long as the run, called with batches of answers.

consumes      answers
produces      their rewards
waits for     the batch before; the process, within the deadline of a batch
on failure    a batch that is late or kills the process fails as a whole; the object is made again for the next batch
on cancel     the batch is finished for its other answers
"""

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RewardFailed
from asyncrl.event_loop import PeerTimer
from asyncrl.rewards.pool import LOST_S, PoolBroken, WorkerPool, outcome

MOST_IN_BATCH = 64
"""Answers in one call of ``compute_reward``, at most."""
MOST_TRIES = 10
"""Starts of the process for one answer, at most, if the process ends before its batch begins."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    prompt: str
    response: str
    reward: "asyncio.Future[Any]"


class ModelProcess:
    """The process of one user object, and the answers that wait for it."""

    def __init__(self, pool: WorkerPool, resolver: bytes, *, timeout_s: float, load_timeout_s: float) -> None:
        """``pool`` must have one worker."""
        self.pool = pool
        self._resolver = resolver
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._loaded_in = 0
        """The start of the pool whose process has the object; 0: none has it."""
        self._is_busy = False
        self._waiting: deque[_Waiting] = deque()

    async def score(self, prompt: str, response: str) -> Any:
        """Return the model's reward of one answer; answers that wait together share a call.  Raises RewardFailed."""
        for _ in range(MOST_TRIES):
            mine = _Waiting(prompt, response, asyncio.get_running_loop().create_future())
            await self.pool.start()
            self._waiting.append(mine)
            await asyncio.sleep(0)  # the other answers of this moment share the call
            self._begin()
            try:
                return await mine.reward
            except PoolBroken as error:
                broken = error
        raise RewardFailed(f"{MOST_TRIES} times, the process ended before a call; the last: {broken}")

    async def load(self) -> None:
        """Make the object in its process.  Raises RewardFailed."""
        await self.pool.load(self._resolver, self._load_timeout_s)
        self._loaded_in = self.pool.num_starts

    def _begin(self) -> None:
        """Begin a call with the answers that wait, unless one is in progress."""
        while self._waiting and self._waiting[0].reward.done():  # cancelled
            self._waiting.popleft()
        if self._is_busy or not self._waiting:
            return
        batch = [self._waiting.popleft() for _ in range(min(MOST_IN_BATCH, len(self._waiting)))]
        batch = [each for each in batch if not each.reward.done()]
        start = self.pool.num_starts
        limit = self._timeout_s if self._loaded_in == start else self._timeout_s + self._load_timeout_s
        try:
            prompts, responses = [each.prompt for each in batch], [each.response for each in batch]
            future = self.pool.submit(self._resolver, prompts, responses, timeout_s=limit)
        except RewardFailed as error:  # no call follows that would begin the rest
            _fail([*batch, *self._waiting], error)
            self._waiting.clear()
            return
        self._is_busy, loop = True, asyncio.get_running_loop()
        lost = PeerTimer(limit + LOST_S, future.cancel)  # the call is alone, so its worker takes it at once

        def end(done: "Future[Any]") -> None:  # pebble calls back in a thread
            if not loop.is_closed():  # a loop that has closed meanwhile cannot be told
                loop.call_soon_threadsafe(lost.cancel)
                loop.call_soon_threadsafe(self._end, batch, done, limit, start)

        future.add_done_callback(end)

    def _end(self, batch: list[_Waiting], future: "Future[Any]", limit: float, start: int) -> None:
        self._is_busy = False
        try:
            values = rewards_of_batch(outcome(future, limit), len(batch))
        except Exception as error:  # noqa: BLE001 (also a user's __repr__): every answer of the batch must end
            self._loaded_in = 0  # the process may be a new one
            _fail(batch, error if isinstance(error, RewardFailed) else RewardFailed(f"{type(error).__name__}: {error}"))
        else:
            self._loaded_in = start
            for each, value in zip(batch, values, strict=True):
                if not each.reward.done():
                    each.reward.set_result(value)
        self._begin()


def rewards_of_batch(values: Any, num_answers: int) -> list[Any]:
    """Return the list that ``compute_reward`` returned.  Raises RewardFailed for any other value or length."""
    if not isinstance(values, list):
        raise RewardFailed(f"compute_reward must return a list of numbers, got a {type(values).__name__}: {values!r}")
    if len(values) != num_answers:
        raise RewardFailed(f"compute_reward returned {len(values)} rewards for {num_answers} responses")
    return values


def _fail(batch: list[_Waiting], error: RewardFailed) -> None:
    for each in batch:
        if not each.reward.done():
            each.reward.set_exception(type(error)(*error.args))
            each.reward.exception()  # marks it as retrieved: its waiter may be cancelled
