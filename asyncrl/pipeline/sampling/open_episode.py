"""An open episode: a user's function that generates the samples of one place in a group, and its engine calls.

    admitted ──▶ running ⇄ parked ──▶ ended        parked: its group is interrupted, so its engine calls wait

The function runs in a task that outlives the task of its group, because an interruption must not cancel it.  It never
sees an interruption: an engine call that was interrupted continues behind its tokens, inside the same ``generate``.

consumes      an EpisodeStart
produces      an EpisodeOutcome, or the error that ended the episode
waits for     the function, at most ``timeout_s``; each engine call for a slot, and until its group is resumed
on cancel     ``close`` cancels the function and aborts its requests; its result is ignored
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol

from asyncrl.episodes import EpisodeOutcome, EpisodeStart, GeneratedTurn
from asyncrl.errors import EpisodeEnded, EpisodeFailed
from asyncrl.event_loop import PeerTimer, is_cancelled, loop_time
from asyncrl.pipeline.sampling.episode_load import EpisodeLoad
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.sampler import Sampler, sample_seed
from asyncrl.pipeline.sampling.user_coroutine import abandonable
from asyncrl.types import Chunk, FinishReason, SamplingParams, Weights

logger = logging.getLogger(__name__)

END_S = 10.0
"""Seconds for a cancelled function to end.  After that it is left alone, so that it does not hold up the run."""


class EpisodeOwner(Protocol):
    """The owner of open episodes, in whose task group their functions run."""

    def start(self, episode: "OpenEpisode") -> "asyncio.Task[None]":
        """Start the task of an episode."""

    def moved(self, episode: "OpenEpisode") -> None:
        """Note that the function asks an engine, after its tools."""

    def ended(self, episode: "OpenEpisode") -> None:
        """Note that an episode ended, in any way."""


class _Call:
    """One call of ``generate``, over all its attempts."""

    __slots__ = ("deadline", "interruptions", "number", "on_chunk", "partial", "resumed_at", "seconds", "task")

    def __init__(self, number: int, partial: PartialSample, on_chunk: Callable[[Chunk], None] | None) -> None:
        self.number = number
        self.partial = partial
        self.on_chunk = on_chunk
        self.interruptions = 0
        self.resumed_at = 0
        """Number of tokens when the group was last resumed."""
        self.seconds = 0.0
        """Seconds on an engine, without an attempt that is running."""
        self.deadline: asyncio.Timeout | None = None
        """The deadline that ends the running attempt; None without one."""
        self.task: asyncio.Task[object] | None = None

    def interrupt(self) -> None:
        """End the running attempt.  Tokens that still arrive for it do not reach the next one."""
        self.partial = self.partial.resumed()
        self.interruptions += 1
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(loop_time())


class OpenEpisode:
    """One episode; see ``episodes.EpisodeTurns`` for its function's view.  ``resume`` starts it."""

    def __init__(
        self,
        start: EpisodeStart,
        sampler: Sampler,
        owner: EpisodeOwner,
        load: EpisodeLoad,
        hold: Callable[[], AbstractAsyncContextManager[int]],
    ) -> None:
        """``hold`` returns the context in which an engine call has a slot."""
        if sampler.episodes is None:
            raise AssertionError("the sampler has no episodes")
        self.start = start
        self.num_tokens = 0
        """Tokens generated so far, over all calls, also if an attempt failed or the function did not use them."""
        self.result: EpisodeOutcome | BaseException | None = None
        self._settings = sampler.episodes
        self._sampler = sampler
        self._owner = owner
        self._load = load
        self._hold = hold
        self._calls: list[_Call] = []
        self._running: set[_Call] = set()
        """Calls that wait for a slot or hold one."""
        self._num_held = 0
        self._is_active = False
        self._count: Callable[[int], bool] = lambda num_tokens: True
        self._may_generate = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._since = 0.0
        """Time of the last change between tools and engines."""
        self._time_left_s = self._settings.timeout_s
        self._time_limit: PeerTimer | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_given_up = False
        self._patience: asyncio.TimerHandle | None = None
        load.open()

    # ---- the group's view

    @property
    def index(self) -> int:
        """Position in the group."""
        return self.start.index

    @property
    def num_calls(self) -> int:
        """Number of engine calls so far."""
        return len(self._calls)

    @property
    def engine_s(self) -> float:
        """Seconds of its finished engine calls on engines."""
        return sum(call.seconds for call in self._calls)

    @property
    def state(self) -> str:
        """A phrase for what the episode does now."""
        if self.result is not None:
            return "ended"
        if not self._may_generate.is_set():
            return "interrupted"
        if not self._running:
            return f"in a tool for {loop_time() - self._since:.0f} s"
        return "on an engine" if self._num_held else "waiting for a slot"

    def resume(self, count: Callable[[int], bool]) -> None:
        """Start the function, or let the engine calls of a parked episode continue.

        ``count`` is called with the number of tokens of each chunk, and returns False if their group is gone.
        """
        self._count = count
        for call in self._calls:  # also of an ended episode, whose group may have been interrupted after its end
            call.resumed_at = call.partial.num_tokens
        if self.result is not None:
            return
        self._since = loop_time()
        self._may_generate.set()
        self._time_limit = PeerTimer(self._time_left_s, self._run_out_of_time)
        self._weigh()
        if self._task is None:
            self._task = self._owner.start(self)

    def interrupt(self) -> None:
        """Park the episode: end its attempts, and keep their tokens.  The function continues with its tools."""
        if self.result is not None or not self._may_generate.is_set():
            return
        self._may_generate.clear()
        if self._time_limit is not None:
            self._time_left_s = max(0.0, self._time_limit.when() - loop_time())
            self._time_limit.cancel()
        for call in self._running:
            call.interrupt()
        self._weigh()

    def close(self) -> None:
        """Cancel the episode, whose group is gone.  No-op if it has ended."""
        self._end(EpisodeEnded(f"{self.start.name}: the episode was cancelled", "cancelled"))
        self._cancel()

    async def outcome(self) -> EpisodeOutcome:
        """Wait for the end of the episode and return its result.  Raises the error that ended it.

        Cancelling this does not cancel the episode.
        """
        await self._has_ended.wait()
        if isinstance(self.result, EpisodeOutcome):
            return self.result
        raise self.result or AssertionError("the episode has ended without a result")

    def resumed_at(self, call: int) -> int | None:
        """Return the number of tokens that a call had when the group was last resumed; None if there is no such call.

        It is 0 for a call that was made after the resumption.
        """
        return self._calls[call].resumed_at if call < len(self._calls) else None

    # ---- the function's view

    @property
    def weights(self) -> Weights:
        """See ``EpisodeTurns.weights``."""
        return self._sampler.serving.now

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        routes_from: int = 0,
    ) -> GeneratedTurn:
        """See ``EpisodeTurns.generate``."""
        self._raise_if_over()
        partial = self._sampler.partial(self.index, self.start.group_id, routes_from)
        call = _Call(len(self._calls), partial, on_chunk)
        self._calls.append(call)
        reason: FinishReason | None = None
        with self._on_engines(call):
            while reason is None:
                await self._may_generate.wait()
                self._raise_if_over()
                reason = await self._attempt(call, token_ids, sampling)
        turn = call.partial.finish(self._sampler.decode(call.partial.token_ids), reason, call.seconds)
        return GeneratedTurn(
            call=call.number,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            spans=turn.spans,
            text=turn.text,
            finish=reason,
            seconds=turn.seconds,
            kept=turn.kept,
            top=turn.top,
            routes=call.partial.routes,
        )

    @contextmanager
    def _on_engines(self, call: _Call) -> Iterator[None]:
        self._running.add(call)
        self._since = loop_time()
        self._owner.moved(self)
        self._weigh()
        try:
            yield
        finally:
            self._running.discard(call)
            self._since = loop_time()
            self._weigh()

    async def _attempt(self, call: _Call, token_ids: tuple[int, ...], sampling: SamplingParams) -> FinishReason | None:
        """Send the call to an engine until it ends; return None if an interruption ends it first."""
        # Invariant: ``partial`` and ``count`` belong to this attempt.  After an interruption, chunks may still arrive
        # for it: ``count`` then finds its group gone, and the copy in ``call.partial`` stays as it was.
        partial, count = call.partial, self._count

        def extend(chunk: Chunk) -> None:
            if count(len(chunk.token_ids)):
                self.num_tokens += len(chunk.token_ids)
            if call.partial is partial:
                partial.extend(chunk)
                if call.on_chunk is not None:
                    call.on_chunk(chunk)

        name = f"{self.start.name}.t{call.number}" + (f"~{call.interruptions}" if call.interruptions else "")
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                call.deadline, call.task = deadline, asyncio.current_task()
                async with self._hold() as slot:
                    with self._holding(call):
                        reason, _ = await self._sampler.turn(
                            slot, name, self._seed_of(call), token_ids, sampling, partial, extend, self.start.name
                        )
        except TimeoutError:
            if not deadline.expired():
                raise
            return None
        finally:
            call.deadline = call.task = None
        return reason if call.partial is partial else None

    @contextmanager
    def _holding(self, call: _Call) -> Iterator[None]:
        start = loop_time()
        self._num_held += 1
        self._weigh(held=1)
        try:
            yield
        finally:
            self._num_held -= 1
            self._weigh(held=-1)
            call.seconds += loop_time() - start

    def _seed_of(self, call: _Call) -> int:
        """Return a seed for the call; the first one has the seed of a single turn."""
        return self.start.seed if call.number == 0 else sample_seed(self.start.seed, "turn", call.number)

    def _raise_if_over(self) -> None:
        if self.result is not None:
            reason = "cancelled" if isinstance(self.result, EpisodeEnded) else "over"
            raise EpisodeEnded(f"{self.start.name}: the episode is over", reason)

    def _weigh(self, held: int = 0) -> None:
        """Tell the load whether the episode is active: open, neither parked nor only waiting for a slot."""
        is_open = self.result is None and self._may_generate.is_set()
        is_active = is_open and (self._num_held > 0 or not self._running)
        change = int(is_active) - int(self._is_active)
        self._is_active = is_active
        if change or held:
            self._load.change(active=change, held=held)

    # ---- the function's task

    async def run(self) -> None:
        """Run the function.  Its result or error becomes that of the episode, unless that has ended."""
        try:
            self._end(await abandonable(self._settings.function(self.start, self), lambda: self._is_given_up))
        except asyncio.CancelledError:
            if is_cancelled():
                self.close()
                raise
            self._end(EpisodeFailed(f"{self.start.name}: the function raised CancelledError"))
        except Exception as error:  # noqa: BLE001 (``outcome`` raises it, in the task of the group)
            self._end(error)
        finally:
            if self._patience is not None:
                self._patience.cancel()

    def _end(self, result: EpisodeOutcome | BaseException) -> None:
        """Set the result, unless there is one.  From here on ``generate`` raises EpisodeEnded."""
        if self.result is not None:
            return
        self.result = result
        if self._time_limit is not None:
            self._time_limit.cancel()
        for call in self._running:
            if call.task is not self._task:  # the function's task is cancelled, or has ended
                call.interrupt()
        self._may_generate.set()
        self._has_ended.set()
        self._weigh()
        self._load.close()
        self._owner.ended(self)

    def _run_out_of_time(self) -> None:
        seconds = self._settings.timeout_s
        self._end(EpisodeFailed(f"{self.start.name}: no result within {seconds:g} s (episode-timeout-s)"))
        self._cancel()

    def _cancel(self) -> None:
        """Cancel the function, and give it up after END_S."""
        if self._task is None or self._task.done() or self._patience is not None:
            return
        self._task.cancel()
        self._patience = asyncio.get_running_loop().call_later(END_S, self._give_up)

    def _give_up(self) -> None:
        logger.warning("%s: its function did not end within %g s of its cancellation", self.start.name, END_S)
        self._is_given_up = True
        if self._task is not None:
            self._task.cancel()
