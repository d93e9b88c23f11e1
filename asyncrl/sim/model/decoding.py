"""One modelled engine, as arithmetic on a clock that its caller moves: no asyncio, no timer.

All running requests get one token per decode step (processor sharing).  A step takes
``t(b) + per_context_token · c + per_longest_token · l`` seconds, for b requests with c tokens of context in total and l
in the longest of them.  Between two events b is constant, c grows by b per step and l by one, so that n steps take
``first · n + more · n² / 2`` seconds, which is solved for n.  Prefill precedes decoding and delays it.  When the KV
cache is full, the youngest requests return to the queue and are prefilled again later.

Lengths are in units of ``grain`` tokens, which are generated together.
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass

from asyncrl.sim.model.costs import EngineCosts

_NEARLY = 1e-6
"""Units: a request this close to its end has ended.  Far above the rounding of 1e7 units of progress (2e-9)."""
_ROOM = 0.05
"""Share of the KV cache that a retraction leaves free, and that stays free when a request is admitted: SGLang frees
space for some ten decode steps at once."""


class Job:
    """One request on an engine.  Lengths in units."""

    __slots__ = ("_last_progress", "context", "left", "running", "target", "written")

    def __init__(self, context: int, left: int) -> None:
        """A job of ``context`` units to prefill and ``left`` units to generate."""
        self.context = context
        self.left = left
        self.written = 0.0
        """Units of ``left`` that are generated so far."""
        self.running = False
        self.target = 0.0
        """The engine's progress at which this request ends.  Valid while running."""
        self._last_progress = 0.0

    @property
    def lead(self) -> float:
        """The request's context minus the engine's progress, while running."""
        return self.context + self.left - self.target

    def start(self, progress: float) -> None:
        """Join the batch at the engine's ``progress``."""
        self.running, self._last_progress, self.target = True, progress, progress + self.left - self.written

    def follow(self, progress: float) -> None:
        """Update ``written`` to the engine's ``progress``."""
        if self.running:
            self.written = min(self.left, self.written + progress - self._last_progress)
            self._last_progress = progress

    def stop(self, progress: float) -> None:
        """Leave the batch."""
        self.follow(progress)
        self.running = False


@dataclass(slots=True)
class DecodedWork:
    """Totals of an engine since its start."""

    busy_s: float = 0.0
    """Seconds with at least one request running, pauses excluded."""
    request_s: float = 0.0
    """Request-seconds: running requests, summed over time."""
    prefilled: float = 0.0
    """Units of first prefills."""
    recomputed: float = 0.0
    """Units prefilled again: after a retraction, an update, an interruption or a lost engine."""
    retractions: int = 0


class Decoder:
    """The running batch and the queue of one engine."""

    def __init__(self, costs: EngineCosts, grain: int) -> None:
        self.work = DecodedWork()
        self.slowdown = 1.0
        """Seconds needed for one second of work."""
        self._costs = costs
        self._grain = grain
        self._capacity = costs.kv_tokens / grain
        self._now = 0.0
        self._progress = 0.0
        self._context = 0.0
        self._stall_s = 0.0
        self._paused = False
        self._running: dict[Job, None] = {}  # in order of admission
        self._waiting: deque[Job] = deque()
        self._ends: list[tuple[float, int, Job]] = []
        self._lead = 0.0
        """The longest context minus the progress.  Maintained only if ``per_longest_token_s`` is not 0."""
        self._prefilled_s = -1.0
        """Time of the last admission."""
        self._order = itertools.count()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Requests running and waiting."""
        return (*self._running, *self._waiting)

    def add(self, job: Job, *, fresh: bool) -> None:
        """Queue a request; ``fresh`` means that no engine has prefilled it before."""
        if fresh:
            self.work.prefilled += job.context
        else:
            self.work.recomputed += job.context
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """Remove a request, running or waiting."""
        if job in self._running:
            self._leave(job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def advance(self, now: float) -> list[Job]:
        """Move to ``now``, which must not lie past the next event.  Returns the requests that ended; they have left."""
        elapsed, self._now = now - self._now, now
        if self._running and not self._paused:
            self.work.busy_s += elapsed
            self.work.request_s += elapsed * len(self._running)
            self._decode(elapsed / self.slowdown)
        ended = self._ended()
        if not self._paused:
            self._retract()
            self._admit()
        return ended

    def next_event_s(self) -> float | None:
        """Seconds from now until a request ends or the cache is full; None: never."""
        if self._paused or not self._running:
            return None
        self._forget_ends()
        first, more = self._slope()
        steps = min(self._ends[0][0] - self._progress, (self._capacity - self._context) / len(self._running))
        steps = max(0.0, steps)
        return self.slowdown * (self._stall_s + first * steps + more * steps * steps / 2)

    def pause(self) -> None:
        """Stop decoding and prefill.  Call ``advance`` first."""
        self._paused = True

    def continue_generation(self, *, recompute: bool) -> None:
        """Resume after a pause; ``recompute`` prefills the KV cache of all running requests again."""
        self._paused = False
        if recompute:
            self._prefill(self._context)
            self.work.recomputed += self._context

    def follow(self) -> None:
        """Update ``written`` of every running job.  Call ``advance`` first."""
        for job in self._running:
            job.follow(self._progress)

    # ---- decoding

    def _slope(self) -> tuple[float, float]:
        """Seconds per unit of progress now, and the seconds that each further unit adds."""
        batch, grain, costs = len(self._running), self._grain, self._costs
        longest = grain * (self._lead + self._progress) if costs.per_longest_token_s else 0.0
        first = grain * costs.step_s(batch, grain * self._context, longest)
        return first, grain * grain * (costs.per_context_token_s * batch + costs.per_longest_token_s)

    def _join(self, lead: float) -> None:
        """Update the longest lead.  A request's lead stays constant while it runs."""
        self._lead = lead if len(self._running) == 1 else max(self._lead, lead)

    def _lose(self, lead: float) -> None:
        if self._costs.per_longest_token_s and lead >= self._lead - _NEARLY:
            self._lead = max((job.lead for job in self._running), default=0.0)

    def _decode(self, elapsed: float) -> None:
        stalled = min(self._stall_s, elapsed)
        self._stall_s -= stalled
        elapsed -= stalled
        if elapsed > 0:
            first, more = self._slope()
            steps = 2 * elapsed / (first + math.sqrt(first * first + 2 * more * elapsed))
            self._progress += steps
            self._context += steps * len(self._running)

    def _prefill(self, units: float) -> None:
        self._stall_s += units * self._grain / self._costs.prefill_tokens_per_s

    # ---- admission and leaving

    def _admit(self) -> None:
        allowed = self._capacity * (1 - _ROOM)
        while self._waiting and len(self._running) < self._costs.max_running:
            job = self._waiting[0]
            context = job.context + job.written
            if self._running and self._context + context > allowed:
                return
            self._waiting.popleft()
            self._prefill(context)
            self._context += context
            self._running[job] = None
            job.start(self._progress)
            heapq.heappush(self._ends, (job.target, next(self._order), job))
            self._join(context - self._progress)
            if self._now != self._prefilled_s:  # requests admitted at one moment share a prefill
                self._prefilled_s = self._now
                self._stall_s += self._costs.prefill_fixed_s

    def _ended(self) -> list[Job]:
        ended = []
        while self._running and self._ends:
            self._forget_ends()
            target, _, job = self._ends[0]
            if target > self._progress + _NEARLY:
                break
            self._leave(job)
            job.written = job.left
            ended.append(job)
        return ended

    def _retract(self) -> None:
        if self._context < self._capacity - _NEARLY:
            return
        while len(self._running) > 1 and self._context > self._capacity * (1 - _ROOM):
            job = next(reversed(self._running))
            self._leave(job)
            self._waiting.appendleft(job)
            self.work.retractions += 1
            self.work.recomputed += job.context + job.written

    def _leave(self, job: Job) -> None:
        del self._running[job]
        job.stop(self._progress)
        self._context -= job.context + job.written
        self._lose(job.lead)
        if not self._running:
            self._context = self._stall_s = 0.0
            self._ends.clear()

    def _forget_ends(self) -> None:
        """Drop the ends of requests that left earlier."""
        while (end := self._ends[0]) and not (end[2].running and end[2].target == end[0]):
            heapq.heappop(self._ends)
