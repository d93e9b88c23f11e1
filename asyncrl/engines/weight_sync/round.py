"""The steps that all kinds of weight updates share: all engines pause, receive the new weights, and resume.

pause all ──▶ receive, as the updater does it ──▶ all resume
  ├─ an engine dies in any step, stops answering, or is cut off from the trainer: UpdateInterrupted, once it is found
  │  dead or has been ended
  ├─ the connection of a command breaks although the engine lives: UpdateInterrupted, MOST_REPEATS times in a row
  └─ any other failure is final
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import (
    AsyncRLError,
    EngineError,
    EngineLost,
    EngineRejected,
    EngineTimeout,
    UpdateInterrupted,
    WeightUpdateFailed,
    is_out_of_reach,
    plainly,
)
from asyncrl.event_loop import Deadline
from asyncrl.task_groups import TaskGroup
from asyncrl.types import UpdateReport

logger = logging.getLogger(__name__)

GiveUp = Callable[[], Awaitable[bool]]
"""Releases engines that wait for each other; returns whether that worked."""
FindCutOff = Callable[[], Awaitable[Mapping[str, str]]]
"""Finds engines that answer HTTP, but which no weights can reach; returns the reason for each URL."""
Answer = Literal["answers", "silent", "broken", "gone"]
"""The result of a probe.

``broken``: the engine answers with an error, or closes the connection.  ``gone``: no connection can be made.
"""
PauseMode = Literal["in_place", "retract"]
"""``in_place``: paused requests keep their KV cache.  ``retract``: they drop it and recompute it under new weights."""

LOST_S = 45.0
"""Seconds for an engine to be found dead after an update has failed.

Other engines may fail first: SGLang's HTTP process takes 5 s to notice that its scheduler has ended.
"""

GONE_S = 6.0
"""Seconds for the supervisor to find the engine dead to which no connection can be made.

It does not find a machine that has vanished: its question to the machine waits, as does Ray's.
"""

MOST_REPEATS = 2
"""Times in a row that an update starts again although no engine is lost, because a command's connection broke."""

PROBE_S = 12.0
"""Deadline in seconds of a liveness probe, which an engine answers between two forward passes.

Above the deadline of a connection, so that an engine to which none can be made is not taken for a silent one.
"""

SETTLE_S = 15.0
"""Seconds for the other engines' answers once a command to all engines has failed at one.

A connection takes 10 s at most.  So an engine that is silent at the end has been sent the command.
"""


class Pausable(Protocol):
    """An engine that can pause.  Every command raises EngineTimeout, EngineLost or EngineRejected."""

    @property
    def url(self) -> str:
        """The engine's URL, which identifies it."""

    async def pause(self, mode: PauseMode) -> None:
        """Hold every request where it is; ``mode`` decides whether its KV cache is kept.

        May return while a forward pass still runs; other commands wait for its end.
        """

    async def continue_generation(self) -> None:
        """Resume the paused requests."""

    async def probe(self, timeout_s: float) -> None:
        """Return once the process that uses the GPU answers."""


class Stillness:
    """The times at which the engines of one update ended their last forward pass, on the event loop's clock."""

    def __init__(self) -> None:
        self._since: list[float | None] = []

    def note(self, seconds: float | None) -> None:
        """Note an engine's answer, which has just arrived: seconds since its last forward pass, or None if unknown."""
        self._since.append(None if seconds is None else asyncio.get_running_loop().time() - seconds)

    def first(self) -> float | None:
        """Return the earliest time; None unless all engines know theirs."""
        known = [since for since in self._since if since is not None]
        return min(known) if known and len(known) == len(self._since) else None


class PausedRound[E: Pausable]:
    """The weight updates of the membership's engines, one at a time."""

    def __init__(
        self, membership: EngineMembership[E], *, timeout_s: float, pause_mode: PauseMode, lost_s: float
    ) -> None:
        """Set the deadlines, in seconds.

        ``timeout_s`` applies to pausing all engines, and to resuming them.  ``lost_s`` is how long a failed update
        waits for its cause, an engine, to be found dead.
        """
        self._membership = membership
        self.engines: tuple[E, ...] = ()
        """The engines of the next update; engines that rejoin later get another update."""
        self.since = -1
        """The membership's ``num_changes`` when ``engines`` were chosen."""
        self._timeout_s = timeout_s
        self._pause_mode: PauseMode = pause_mode
        self._lost_s = lost_s
        self._is_mixed = False
        """Whether engines may have weights of two versions; they must not resume then."""
        self._num_repeats = 0
        """Times in a row that an update started again although no engine was lost."""

    @property
    def is_outdated(self) -> bool:
        """Whether engines must be chosen anew: one was lost or restarted since ``choose``, or a connection broke."""
        return self._membership.num_changes != self.since

    def choose(self) -> None:
        """Choose all present engines for the next update."""
        self.engines, self.since = self._membership.present, self._membership.num_changes

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await self._membership.wait_for_rejoined()

    async def publish(
        self,
        receive: Callable[[], Awaitable[float | None]],
        num_bytes: int,
        give_up: GiveUp | None = None,
        find_cut_off: FindCutOff | None = None,
    ) -> UpdateReport:
        """Have the chosen engines, of which there may be none, ``receive`` ``num_bytes`` of weights.

        ``receive`` returns the event loop's time at which the first engine ended its last forward pass, or None.  With
        None the pause is measured from the first engine's answer to the pause command.  ``give_up`` releases engines
        that wait for each other after a failure.  See ``blaming_the_lost`` for ``find_cut_off``.

        If pausing fails, the engines resume.  After a later failure they stay paused until an update succeeds, because
        their weights may be a mix of old and new.  Raises WeightUpdateFailed, or UpdateInterrupted if an engine died.
        """
        engines, since, clock = self.engines, self.since, asyncio.get_running_loop().time
        if not engines:
            return UpdateReport(pause_s=0.0, total_s=0.0, num_bytes=0)
        began = clock()
        async with self.blaming_the_lost(give_up, find_cut_off):
            paused = await self._pause(engines)
            self._is_mixed = True
            stood_still = await receive()
            self._is_mixed = False
            resumed = await self._send(engines, _resume)
            await self._leave_out_silent(resumed)
            resumed.raise_first("resuming")
        self._num_repeats = 0
        self._membership.mark_synced(engines, since)
        pause_s = clock() - (paused if stood_still is None else stood_still)
        return UpdateReport(pause_s=pause_s, total_s=max(pause_s, clock() - began), num_bytes=num_bytes)

    @contextlib.asynccontextmanager
    async def blaming_the_lost(
        self, give_up: GiveUp | None = None, find_cut_off: FindCutOff | None = None
    ) -> AsyncIterator[None]:
        """Turn a WeightUpdateFailed into an UpdateInterrupted if an engine has died since ``choose``.

        A death is noticed some time after the connection broke.  An engine that lives and does not answer is marked
        unresponsive, and the supervisor ends it.  If all answer, ``find_cut_off`` may find one that is out of reach.
        If all are in reach and only the connection of a command broke, the update may start again as well.
        """
        try:
            yield
        except WeightUpdateFailed as error:
            if not self.is_outdated:
                all_answer = await self._look_for_the_lost(give_up, str(error))
                if all_answer and find_cut_off is not None:
                    await self.leave_out(await find_cut_off())
                if all_answer and not self.is_outdated:
                    self._start_again(error)
            if not self.is_outdated:
                raise
            raise UpdateInterrupted(str(error)) from error

    def _start_again(self, error: WeightUpdateFailed) -> None:
        """Have the engines chosen anew if a command's connection broke, at most ``MOST_REPEATS`` times in a row."""
        if isinstance(error.__cause__, EngineLost) and self._num_repeats < MOST_REPEATS:
            self._num_repeats += 1
            self.since = -1

    async def leave_out(self, cut_off: Mapping[str, str]) -> None:
        """Have the supervisor end these engines, each for its reason; return once they are lost."""
        for url, why in cut_off.items():
            self._membership.mark_unresponsive(url, why)
        with contextlib.suppress(TimeoutError):
            async with Deadline(self._lost_s):
                await self._membership.wait_until_lost(cut_off)

    async def _look_for_the_lost(self, give_up: GiveUp | None, why: str) -> bool:
        """Return once an engine is lost, all have answered, or ``lost_s`` has passed; whether all have answered."""
        logger.warning(
            "a weight update failed; looking for an engine that died or hangs, for %g s at most: %s", self._lost_s, why
        )
        try:
            async with Deadline(self._lost_s) as deadline:
                with plainly():
                    async with TaskGroup() as tasks:
                        changed = tasks.create_task(
                            self._membership.wait_for_change(self.since), name="an engine is lost"
                        )
                        asking = tasks.create_task(self._ask_all(give_up, why), name="all answer")
                        changed.add_done_callback(lambda _: asking.cancel())
                        asking.add_done_callback(lambda _: changed.cancel())
        except TimeoutError:
            if not deadline.expired():  # raised inside, which is a bug
                raise
            return False
        return not (asking.cancelled() or self.is_outdated)

    async def _ask_all(self, give_up: GiveUp | None, why: str) -> None:
        """Return once all engines have answered, or one is lost; mark those unresponsive that are silent or gone.

        Silence is no evidence against an engine if none of several answers.  Neither is it for a single engine, unless
        the update was given up: the engine may only be waiting for the trainer.  An engine is gone if no connection to
        it can be made in two attempts.
        """
        is_free = give_up is not None and await _gave_up(give_up)
        found = await _probed_all(self.engines)
        if gone := [each for each in self.engines if found[each.url] == "gone"]:
            await asyncio.sleep(GONE_S)
            found |= await _probed_all(gone)
        if all(answer == "answers" for answer in found.values()):
            return
        is_evidence = "answers" in found.values() or (is_free and len(found) == 1)
        for url, answer in found.items():
            if answer == "gone":
                self._membership.mark_unresponsive(url, f"cannot be reached: {why}")
            elif answer == "silent" and is_evidence:
                self._membership.mark_unresponsive(url, f"lives and does not answer: {why}")
        await self._membership.wait_for_change(self.since)

    async def _pause(self, engines: Sequence[Pausable]) -> float:
        """Pause all engines, and return the event loop's time of the first answer."""
        answered: list[float] = []

        async def pause(engine: Pausable) -> None:
            await engine.pause(self._pause_mode)
            answered.append(asyncio.get_running_loop().time())

        paused = await self._send(engines, pause)
        if paused.has_failed:
            commands = [paused] if self._is_mixed else [paused, await self._send(engines, _resume)]
            await self._leave_out_silent(*commands)
        paused.raise_first("pausing")
        return min(answered)

    async def _send(self, engines: Sequence[Pausable], command: Callable[[Any], Awaitable[None]]) -> "Answers":
        """Give a command to all engines, and return once all have answered or the time is over.

        No failure cancels the commands to other engines: one that is on its way is carried out all the same.
        """
        answers = Answers(engines=tuple(engine.url for engine in engines), limit_s=self._timeout_s)
        deadline = Deadline(self._timeout_s)

        async def send(engine: Pausable) -> None:
            try:
                await command(engine)
            except AsyncRLError as error:
                if not answers.errors:
                    deadline.give(min(SETTLE_S, self._timeout_s))
                answers.errors[engine.url] = error
            else:
                answers.done.add(engine.url)

        try:
            with plainly():
                async with deadline, TaskGroup() as tasks:
                    for engine in engines:
                        tasks.create_task(send(engine), name=f"command to {engine.url}")
        except TimeoutError:
            if not deadline.expired():
                raise
        return answers

    async def _leave_out_silent(self, *commands: "Answers") -> None:
        """Have engines ended that did not answer a command.

        It may reach them much later: they would generate while their weights change, or stand still for ever.  Silence
        is no evidence against an engine if none of several answers, unless the update is about to start again.
        """
        counting = [answers for answers in commands if self.is_outdated or answers.are_evidence]
        silent = sorted({url for answers in counting for url in answers.silent})
        await self.leave_out(dict.fromkeys(silent, "does not answer a command to pause or to resume"))


@dataclass(slots=True)
class Answers:
    """The answers of engines to a command."""

    engines: tuple[str, ...]
    limit_s: float
    done: set[str] = field(default_factory=set)
    errors: dict[str, AsyncRLError] = field(default_factory=dict)
    """Errors by engine, in the order in which they came."""

    @property
    def silent(self) -> list[str]:
        """The engines that may still carry the command out."""
        late = {url for url, error in self.errors.items() if isinstance(error, EngineTimeout)}
        return [url for url in self.engines if url in late or not (url in self.done or url in self.errors)]

    @property
    def are_evidence(self) -> bool:
        """Whether silence speaks against an engine: another one was not silent, or there is no other."""
        return len(self.engines) == 1 or len(self.silent) < len(self.engines)

    @property
    def has_failed(self) -> bool:
        """Whether an engine has not done it."""
        return len(self.done) < len(self.engines)

    def raise_first(self, doing: str) -> None:
        """Raise WeightUpdateFailed with the first error, or the engines that did not answer."""
        for url, error in self.errors.items():
            raise WeightUpdateFailed(f"{doing}: {url}: {error}") from error
        if self.silent:
            raise WeightUpdateFailed(f"{doing}: no answer from {', '.join(self.silent)} within {self.limit_s:g} s")


async def _resume(engine: Pausable) -> None:
    await engine.continue_generation()


async def _gave_up(give_up: GiveUp) -> bool:
    """Call ``give_up``, and return whether it worked within ``PROBE_S``."""
    try:
        async with Deadline(PROBE_S):
            return await give_up()
    except TimeoutError:
        return False


async def _probed_all(engines: Sequence[Pausable]) -> dict[str, Answer]:
    """Return what the probes of these engines find, by URL."""
    async with TaskGroup() as tasks:
        probes = {each.url: tasks.create_task(_probed(each), name=f"probe {each.url}") for each in engines}
    return {url: probe.result() for url, probe in probes.items()}


async def _probed(engine: Pausable) -> Answer:
    try:
        await engine.probe(PROBE_S)
    except EngineTimeout:
        return "silent"
    except EngineRejected:  # an SGLang without this command, which nevertheless answers
        return "answers"
    except EngineError as error:  # the engine has died, or its machine has vanished
        return "gone" if is_out_of_reach(error) else "broken"
    return "answers"
