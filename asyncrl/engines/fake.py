"""Fakes of engines, trainer and weight updates: the same contracts, on any event-loop clock, without computing.

For tests of scheduling, never for a run.  A contract test holds the fake and the real engine to the same contract.
"""

import asyncio
import hashlib
import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from asyncrl.errors import (
    CheckpointFailed,
    EngineError,
    GpuSharingFailed,
    NonFiniteLoss,
    TrainerFailed,
    UpdateInterrupted,
    WeightUpdateFailed,
)
from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import Batch, Chunk, FinishReason, Prompt, Request, TrainReport, UpdateReport, Weights

VOCABULARY = 64
"""Vocabulary size of all fakes."""


def eight_tokens(request: Request) -> int:
    """Return the default length of an answer, in tokens."""
    return 8


class FakeEngine:
    """Generates ``lengths(request)`` pseudo-random tokens, ``chunk`` at a time, at a steady rate.

    ``failures`` maps a request id to the error raised after its first chunk.
    """

    def __init__(
        self,
        lengths: Callable[[Request], int] = eight_tokens,
        *,
        seconds_per_token: float = 0.01,
        chunk: int = 4,
        failures: dict[str, EngineError] | None = None,
        routes: Literal["chunks", "end"] | None = None,
    ) -> None:
        """``routes`` come with every chunk, or only with the last one of a request that is not lost."""
        self.now_busy: list[Request] = []
        self.most_busy = 0
        self.requests: list[Request] = []
        self._weights = Weights(version=0, step=0)
        self._lengths = lengths
        self.seconds_per_token = seconds_per_token
        """A test may change it at any time."""
        self._chunk = chunk
        self._failures = failures or {}
        self._routes = routes
        self._going_on = asyncio.Event()
        self._going_on.set()
        self._interrupted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> int:
        """Requests in flight."""
        return len(self.now_busy)

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``."""
        self.requests.append(request)
        self.now_busy.append(request)
        self._idle.clear()
        self.most_busy = max(self.most_busy, self.busy)
        try:
            return await self._write(request, on_chunk)
        finally:
            self.now_busy.remove(request)
            if not self.now_busy:
                self._idle.set()

    async def interrupt(self) -> None:
        """See ``RolloutEngine.interrupt``."""
        self._interrupted.set()
        await self._idle.wait()
        self._interrupted.clear()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``."""
        await asyncio.sleep(self.seconds_per_token)
        return _logprobs(token_ids, start, self._weights.step)

    async def pause(self) -> None:
        """Hold every request where it is."""
        self._going_on.clear()

    def continue_generation(self, weights: Weights) -> None:
        """Resume requests, under ``weights``."""
        self._weights = weights
        self._going_on.set()

    async def _write(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        limit = request.sampling.max_new_tokens
        wanted = max(self._lengths(request), request.sampling.min_new_tokens)
        length, written = min(wanted, limit), list[int]()
        while len(written) < length:
            weights, size = self._weights, min(self._chunk, length - len(written))
            try:
                was_interrupted, size = await self._time(size)
                await self._going_on.wait()
            except asyncio.CancelledError:
                self._deliver(request, written, 1, weights, on_chunk)  # a token that was already on its way
                raise
            is_last = was_interrupted or len(written) + size == length
            self._deliver(request, written, size, weights, on_chunk, is_last=is_last)
            if request.request_id in self._failures:
                raise self._failures[request.request_id]
            if was_interrupted and len(written) < length:
                return FinishReason.ABORT
        return FinishReason.STOP if wanted <= limit else FinishReason.LENGTH

    def _deliver(
        self,
        request: Request,
        written: list[int],
        size: int,
        weights: Weights,
        on_chunk: Callable[[Chunk], None],
        *,
        is_last: bool = False,
    ) -> None:
        """Pass the next ``size`` tokens to ``on_chunk`` as one chunk."""
        if size == 0:
            return
        place, last = len(request.token_ids) + len(written), written[-1] if written else request.token_ids[-1]
        tokens = tuple(fake_token(request.seed, place + offset) for offset in range(size))
        befores = (last, *tokens[:-1])
        logprobs = array("f", map(fake_logprob, befores, tokens, repeat(weights.step)))
        routes = self._routes_of(request, written, tokens, is_last=is_last)
        written.extend(tokens)
        is_kept = request.returns_kept and request.sampling.is_limited
        kept = fake_kept(befores, tokens) if is_kept else None
        top = fake_top(befores, tokens, request.num_top) if request.num_top else None
        on_chunk(Chunk(token_ids=tokens, logprobs=logprobs, version=weights.version, kept=kept, top=top, routes=routes))

    def _routes_of(
        self, request: Request, written: list[int], tokens: tuple[int, ...], *, is_last: bool
    ) -> Routes | None:
        """Return the rows that were not sent before."""
        if self._routes is None or request.routes_from is None or (self._routes == "end" and not is_last):
            return None
        num_before = len(request.token_ids) + len(written) - 1
        start = num_before if written and self._routes == "chunks" else request.routes_from
        whole = (*request.token_ids, *written, *tokens)
        return fake_routes(whole).part(start, len(whole) - 1)

    async def _time(self, size: int) -> tuple[bool, int]:
        """Sleep for the time of ``size`` tokens; return whether an interruption came, and the tokens by then."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(size * self.seconds_per_token):
                await self._interrupted.wait()
        except TimeoutError:
            return False, size
        return True, min(size, int((clock() - began) / self.seconds_per_token))


class FakeUpdater:
    """A ``WeightUpdater`` that gives new versions to fake engines, with a pause of ``seconds``."""

    def __init__(self, *engines: FakeEngine, seconds: float = 0.1, is_copied: bool = True) -> None:
        self.published: list[Weights] = []
        self.before_snapshot: Callable[[], None] = lambda: None
        self.rejoined = asyncio.Event()
        """Set by a test to announce a restarted engine that waits for weights."""
        self.interruptions = 0
        """The number of next ``publish`` calls that fail as if an engine was lost."""
        self.keeps_copies = True
        """Whether the snapshot survives such a failure."""
        self.died: asyncio.Event | None = None
        """Set while the trainer is dead; None if it never dies."""
        self.num_restarted = 0
        self._engines = engines
        self._seconds = seconds
        self._is_copied = is_copied
        self._has_snapshot = False

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``."""
        self.num_restarted += 1
        self._has_snapshot = False

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await self.rejoined.wait()
        self.rejoined.clear()

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``."""
        self.before_snapshot()
        await self._trainer_sends(0.0)
        self._has_snapshot = self._is_copied
        return self._is_copied

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``."""
        await asyncio.sleep(0)
        return self._has_snapshot

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``."""
        for engine in self._engines:
            await engine.pause()
        await self._trainer_sends(self._seconds)
        if self.interruptions:
            self.interruptions -= 1
            self._has_snapshot &= self.keeps_copies
            raise UpdateInterrupted("an engine was lost")
        for engine in self._engines:
            engine.continue_generation(weights)
        await asyncio.sleep(self._seconds)  # chunks under the new weights may arrive before publish returns
        self.published.append(weights)
        return UpdateReport(pause_s=self._seconds, total_s=2 * self._seconds, num_bytes=0)

    async def _trainer_sends(self, seconds: float) -> None:
        if await _dies_within(self.died, seconds):
            raise WeightUpdateFailed("sending the weights: trainer: it died")


class FakeGpuSharing:
    """A ``GpuSharing`` that takes ``seconds`` for each change of the holder, and records the holders.

    Raises for changes that would fail with real memory.
    """

    def __init__(self, *engines: FakeEngine, seconds: float = 0.1) -> None:
        self.taken: list[str] = []
        self.holder = "engines"
        self._engines = engines
        self._seconds = seconds

    async def acquire_for_training(self) -> None:
        """See ``GpuSharing.acquire_for_training``."""
        if self.holder == "update":
            raise AssertionError("the engines have no new weights yet")
        if any(engine.busy for engine in self._engines):
            raise GpuSharingFailed("an engine has requests")
        await self._pass_to("trainer")

    async def acquire_for_update(self) -> None:
        """See ``GpuSharing.acquire_for_update``."""
        if self.holder == "engines":
            raise AssertionError("the trainer has no memory to take weights from")
        await self._pass_to("update")

    async def acquire_for_generation(self) -> None:
        """See ``GpuSharing.acquire_for_generation``."""
        if self.holder == "trainer":
            raise AssertionError("engines must receive weights before they generate")
        await self._pass_to("engines")

    async def _pass_to(self, holder: str) -> None:
        if self.holder != holder:
            await asyncio.sleep(self._seconds)
            self.holder = holder
            self.taken.append(holder)


async def _dies_within(died: asyncio.Event | None, seconds: float) -> bool:
    """Sleep for ``seconds``; return True, and at once, if the trainer dies."""
    if died is None or seconds <= 0:
        await asyncio.sleep(seconds)
        return died is not None and died.is_set()
    try:
        async with asyncio.timeout(seconds):
            return await died.wait()
    except TimeoutError:
        return False


class FakeTrainer:
    """A ``Trainer`` that takes ``seconds`` for a step and records the batches."""

    def __init__(self, seconds: float = 1.0, spoils: Callable[[Batch], bool] = lambda batch: False) -> None:
        """``spoils``: whether the loss of a batch is not finite."""
        self.batches: list[Batch] = []
        """Every batch that was trained, in order."""
        self.behind_weights: list[Batch] = []
        """The batches behind the present weights, which a restart takes back."""
        self.died = asyncio.Event()
        """Set while the trainer is dead."""
        self._spoils = spoils
        self.saved: list[Path] = []
        self._seconds = seconds

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        if await _dies_within(self.died, self._seconds):
            raise TrainerFailed("trainer rank 0, train: it died")
        if self._spoils(batch):
            raise NonFiniteLoss(f"policy: loss nan in step {batch.step}")
        self.batches.append(batch)
        self.behind_weights.append(batch)
        return TrainReport(
            loss=0.0,
            grad_norm=1.0,
            clip_fraction=0.0,
            entropy=math.log(VOCABULARY),
            learning_rate=0.0,
            seconds=self._seconds,
            logprobs=tuple(
                _logprobs((*prompt, *scored.sample.token_ids), len(prompt), batch.step)
                for group in batch.groups
                for scored in group.samples
                for prompt in (scored.sample.prompt_ids or group.prompt.token_ids,)
            ),
        )

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``."""
        if self.died.is_set():
            raise TrainerFailed("trainer rank 0, save: it died")
        self.saved.append(path)


class FakeTrainerProcesses:
    """Processes of a FakeTrainer.  Their restart takes ``seconds``, and the first ``failures`` restarts fail."""

    def __init__(
        self,
        trainer: FakeTrainer,
        updater: FakeUpdater,
        checkpoints: "FakeCheckpoints | None",
        *,
        first_step: int = 0,
        seconds: float = 3.0,
        failures: int = 0,
    ) -> None:
        self.failures = failures
        self.savings: list[str] = []
        """Ways to save memory that are left."""
        self.restored: list[int] = []
        """The step of the checkpoint of each restart."""
        self._trainer = trainer
        self._updater = updater
        self._checkpoints = checkpoints
        self._first_step = first_step
        self._seconds = seconds
        updater.died = trainer.died
        if checkpoints is not None:
            checkpoints.died = trainer.died

    async def wait_until_lost(self) -> str:
        """See ``TrainerProcesses.wait_until_lost``."""
        await self._trainer.died.wait()
        return "trainer rank 0 died"

    async def find_lost(self) -> str | None:
        """See ``TrainerProcesses.find_lost``."""
        await asyncio.sleep(0.01)
        return "trainer rank 0 died" if self._trainer.died.is_set() else None

    async def restart(self) -> int:
        """See ``TrainerProcesses.restart``."""
        self._trainer.died.set()
        if self._checkpoints is not None:
            self._checkpoints.lose()
        await asyncio.sleep(self._seconds)
        if self.failures:
            self.failures -= 1
            raise TrainerFailed("trainer rank 0, start: it died")
        written = {} if self._checkpoints is None else self._checkpoints.written
        step = max(written, default=self._first_step)
        kept = [batch for batch in self._trainer.behind_weights if batch.step < step]
        self._trainer.behind_weights[:] = kept
        self._updater.trainer_restarted("127.0.0.1")
        self._trainer.died.clear()
        self.restored.append(step)
        return step

    def save_memory(self) -> str | None:
        """See ``TrainerProcesses.save_memory``."""
        return self.savings.pop(0) if self.savings else None


class FakeCheckpoints:
    """A ``Checkpointer`` that takes ``seconds`` to write in the background, and keeps the written ones by step.

    Checkpoints of the steps in ``failing`` fail at the end of that time.
    """

    def __init__(self, seconds: float = 1.0, failing: Collection[int] = ()) -> None:
        self.written: dict[int, dict[str, Any]] = {}
        self.died: asyncio.Event | None = None
        """Set while the trainer is dead; None if it never dies."""
        self._failing = failing
        self._seconds = seconds
        self._writing: tuple[float, int, dict[str, Any]] | None = None

    async def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """See ``Checkpointer.begin``."""
        await self.finish()
        await self._check_lives()
        self._writing = (asyncio.get_running_loop().time() + self._seconds, step, dict(run))

    async def check(self) -> None:
        """See ``Checkpointer.check``."""
        await self._check_lives()
        if self._writing is not None and self._writing[0] <= asyncio.get_running_loop().time():
            await self.finish()

    async def finish(self) -> None:
        """See ``Checkpointer.finish``."""
        if self._writing is not None:
            until, step, run = self._writing
            if await _dies_within(self.died, until - asyncio.get_running_loop().time()):
                raise TrainerFailed("trainer rank 0, finish_checkpoint: it died")
            self._writing = None
            if step in self._failing:
                raise CheckpointFailed(f"iter_{step:07}: No space left on device")
            self.written[step] = run

    def lose(self) -> None:
        """Lose the checkpoint that is being written, unless it is complete by now."""
        self.found(asyncio.get_running_loop().time())
        self._writing = None

    async def _check_lives(self) -> None:
        if await _dies_within(self.died, 0.0):
            raise TrainerFailed("trainer rank 0, checkpoint: it died")

    def found(self, now: float) -> dict[str, Any] | None:
        """Return the newest checkpoint that is complete at ``now``."""
        if self._writing is not None and self._writing[0] <= now and self._writing[1] not in self._failing:
            self.written[self._writing[1]] = self._writing[2]
        return self.written[max(self.written)] if self.written else None


class FakePrompts:
    """A ``PromptSource`` of numbered prompts; counts how many were taken."""

    def __init__(self, rows: int = 1_000_000, taken: int = 0, seconds: float = 0.0) -> None:
        """Have one prompt every ``seconds``, or any number at once with 0."""
        self.taken = taken
        self._rows = rows
        self._seconds = seconds
        self._next_at = 0.0

    async def ready(self) -> None:
        """See ``PromptSource.ready``."""
        if self._seconds:
            loop = asyncio.get_running_loop()
            self._next_at = self._next_at or loop.time() + self._seconds
            if self._next_at > loop.time():
                await asyncio.sleep(self._next_at - loop.time())

    def take(self) -> Prompt:
        """See ``PromptSource.take``."""
        self.taken += 1
        self._next_at += self._seconds
        return self.at(*divmod(self.taken - 1, self._rows))

    def at(self, epoch: int, row: int) -> Prompt:
        """Return the prompt of one row in one epoch."""
        return Prompt(row=row, epoch=epoch, text=str(row), token_ids=(1 + row % (VOCABULARY - 1), 2, 3), label=str(row))


class FakeTokenizer:
    """A ``Tokenizer`` whose text has one number per token."""

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
        return [int(word) for word in text.split()]

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """See ``Tokenizer.decode``."""
        return " ".join(map(str, token_ids))


def fake_token(seed: int, position: int) -> int:
    """Return the token that FakeEngine draws with ``seed`` at ``position``, counted from the first prompt token."""
    return hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=1).digest()[0] % VOCABULARY


def fake_top(befores: Sequence[int], tokens: Sequence[int], count: int) -> TokenSets:
    """Return ``count`` ids that FakeEngine calls the likeliest for each of ``tokens``, with log-probs below zero."""
    ids = np.add.outer(np.array(befores, np.int32) + np.array(tokens, np.int32), np.arange(count, dtype=np.int32))
    return TokenSets(
        counts_T=np.full(len(tokens), count, np.int32),
        ids_I=(ids % VOCABULARY).ravel(),
        logprobs_I=(-1.0 - ids.ravel() / VOCABULARY).astype(np.float32),
    )


def fake_routes(token_ids: Sequence[int]) -> Routes:
    """Return the experts of FakeEngine at each of the positions: two of eight in each of two layers.

    They depend on all tokens up to the position.
    """
    places = np.arange(len(token_ids))
    sums_N = np.cumsum((np.asarray(token_ids) + 1) * (7 * places + 3)) + places
    first_NL = np.stack([sums_N, sums_N // 64], axis=1)
    second_NL = first_NL + 1 + np.stack([sums_N // 8, sums_N // 512], axis=1) % 7
    return Routes(experts_NLK=(np.stack([first_NL, second_NL], axis=2) % 8).astype(np.uint8))


def fake_kept(befores: Sequence[int], tokens: Sequence[int]) -> TokenSets:
    """Return the ids among which FakeEngine drew ``tokens`` behind the tokens ``befores``: one to three each."""
    sets = [
        [token, (token + 1) % VOCABULARY, before][: 1 + (before + token) % 3]
        for before, token in zip(befores, tokens, strict=True)
    ]
    return TokenSets(
        counts_T=np.array([len(ids) for ids in sets], np.int32), ids_I=np.array([*chain.from_iterable(sets)], np.int32)
    )


def _logprobs(token_ids: tuple[int, ...], start: int, step: int) -> tuple[float, ...]:
    return tuple(fake_logprob(token_ids[place - 1], token_ids[place], step) for place in range(start, len(token_ids)))


def fake_logprob(before: int, token: int, step: int) -> float:
    """Return FakeEngine's log-prob of ``token`` after ``before``, under the weights of training step ``step``.

    Engine and trainer agree on it; other weights give another one.
    """
    return -(1 + (before * 13 + token * 7 + step) % 97) / 128  # exact in a float32
