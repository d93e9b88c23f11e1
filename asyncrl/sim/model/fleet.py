"""The modelled rollout engines: one ``RolloutEngine`` in front of any number of decoders, on the loop's clock.

A request is sent to the engine with the fewest requests.  Tokens are delivered when it matters: when the answer ends,
when the weights change, and when the request is interrupted, cancelled or lost.  Each engine has one timer, for its
next event.
"""

import asyncio
import random
from collections.abc import Callable

from asyncrl.errors import EngineLost
from asyncrl.sim.model.costs import Costs
from asyncrl.sim.model.decoding import DecodedWork, Decoder, Job
from asyncrl.sim.model.least_loaded import LeastLoaded
from asyncrl.sim.model.workload import Chunks, Workload
from asyncrl.types import Chunk, FinishReason, Request, Weights


class _Call(Job):
    """A job and the ``generate`` call that waits for it."""

    __slots__ = ("delivered", "done", "on_chunk")

    def __init__(self, context: int, left: int, on_chunk: Callable[[Chunk], None]) -> None:
        super().__init__(context, left)
        self.on_chunk = on_chunk
        self.delivered = 0
        self.done: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()


class _Engine:
    """One engine: a decoder, its timer, and its calls."""

    def __init__(self, number: int, decoder: Decoder, deliver: Callable[[_Call], None]) -> None:
        self.number = number
        self.decoder = decoder
        self._deliver = deliver
        self._timer: asyncio.TimerHandle | None = None
        self._dirty = False

    def look_again(self) -> None:
        """Finish the calls that ended and set the timer again, once for all changes of this moment."""
        if not self._dirty:
            self._dirty = True
            asyncio.get_running_loop().call_soon(self._replan)

    def finish_due(self) -> None:
        """Advance the decoder to the present and finish the calls that ended."""
        for job in self.decoder.advance(asyncio.get_running_loop().time()):
            call = _as_call(job)
            self._deliver(call)
            if not call.done.done():
                call.done.set_result(FinishReason.STOP)

    def calls(self) -> list[_Call]:
        """All calls on this engine, with ``written`` up to date."""
        self.finish_due()
        self.decoder.follow()
        return [_as_call(job) for job in self.decoder.jobs]

    def _replan(self) -> None:
        self._dirty = False
        self.finish_due()
        if self._timer is not None:
            self._timer.cancel()
        wait = self.decoder.next_event_s()
        self._timer = None if wait is None else asyncio.get_running_loop().call_later(wait, self._replan)


def _as_call(job: Job) -> _Call:
    assert isinstance(job, _Call)
    return job


class Fleet:
    """A ``RolloutEngine`` over modelled engines."""

    def __init__(self, costs: Costs, workload: Workload, num_engines: int, weights: Weights) -> None:
        self.lost = 0
        """Engines lost so far."""
        self._costs = costs
        self._workload = workload
        self._chunks = Chunks()
        self._weights = weights
        self._loads = LeastLoaded(num_engines)
        self._engines = [
            _Engine(number, Decoder(costs.engine, workload.grain), self._deliver) for number in range(num_engines)
        ]
        self._calls = 0
        self._interruptions = 0
        self._none_left = asyncio.Event()
        self._any_up = asyncio.Event()
        self._on_busy: Callable[[], None] = lambda: None

    # ---- RolloutEngine

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``."""
        interruptions = self._interruptions
        self._calls += 1
        if self._calls == 1:
            self._on_busy()
        try:
            if self._costs.engine.latency_s > 0:
                await asyncio.sleep(self._costs.engine.latency_s)
            engine = await self._up()
            try:
                if self._interruptions != interruptions:
                    return FinishReason.ABORT
                return await self._on(engine, request, on_chunk)
            finally:
                self._loads.release(engine.number)
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._none_left.set()
                self._on_busy()

    async def interrupt(self) -> None:
        """See ``RolloutEngine.interrupt``."""
        self._interruptions += 1
        for engine in self._engines:
            for call in engine.calls():
                self._deliver(call)
                engine.decoder.remove(call)
                if not call.done.done():
                    call.done.set_result(FinishReason.ABORT)
            engine.look_again()
        while self._calls:
            self._none_left.clear()
            await self._none_left.wait()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``; takes no time."""
        return (0.0,) * (len(token_ids) - start)

    # ---- weights, load, failures

    def pause(self) -> None:
        """Stop all engines and deliver the tokens that the present weights generated."""
        for engine in self._engines:
            for call in engine.calls():
                self._deliver(call)
            engine.decoder.pause()
            engine.look_again()

    def continue_generation(self, weights: Weights, *, recompute: bool) -> None:
        """Resume under ``weights``; ``recompute`` prefills the KV cache again."""
        self._weights = weights
        for engine in self._engines:
            engine.finish_due()
            engine.decoder.continue_generation(recompute=recompute)
            engine.look_again()

    @property
    def is_busy(self) -> bool:
        """Whether any request is in flight."""
        return self._calls > 0

    def notify(self, on_busy: Callable[[], None]) -> None:
        """Call ``on_busy`` whenever ``is_busy`` changes."""
        self._on_busy = on_busy

    def slow_down(self, factor: float) -> None:
        """Make every engine need ``factor`` seconds for one second of work from now on."""
        for engine in self._engines:
            engine.finish_due()
            engine.decoder.slowdown = factor
            engine.look_again()

    def start_failing(self, seed: int) -> None:
        """Lose engines at random from now on, if ``failures.mean_s`` is set."""
        if self._costs.failures.mean_s is not None:
            rng = random.Random(seed)
            for engine in self._engines:
                self._lose_later(engine, rng, 1 / self._costs.failures.mean_s)

    def work(self) -> DecodedWork:
        """Totals of all engines up to now."""
        total = DecodedWork()
        for engine in self._engines:
            engine.finish_due()
            done = engine.decoder.work
            total.busy_s += done.busy_s
            total.request_s += done.request_s
            total.prefilled += done.prefilled
            total.recomputed += done.recomputed
            total.retractions += done.retractions
        return total

    # ---- one call

    async def _up(self) -> _Engine:
        while (number := self._loads.pick()) is None:
            self._any_up.clear()
            await self._any_up.wait()
        return self._engines[number]

    async def _on(self, engine: _Engine, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        left, context = self._workload.units_left(request), len(request.token_ids)
        if left <= 0:
            return self._reason(request, 0)
        call = _Call(context, left, on_chunk)
        engine.decoder.add(call, fresh=context == self._workload.prompt_units)
        engine.look_again()
        try:
            await call.done
        except asyncio.CancelledError:
            engine.finish_due()
            engine.decoder.remove(call)  # updates call.written
            self._deliver(call)
            engine.look_again()
            raise
        aborted = call.done.result() is FinishReason.ABORT
        return FinishReason.ABORT if aborted else self._reason(request, left)

    def _reason(self, request: Request, left: int) -> FinishReason:
        return FinishReason.LENGTH if left >= request.sampling.max_new_tokens else FinishReason.STOP

    def _deliver(self, call: _Call) -> None:
        units = int(call.written) - call.delivered
        if units > 0:
            call.delivered += units
            call.on_chunk(self._chunks.of(units, self._weights.version))

    # ---- losing engines

    def _lose_later(self, engine: _Engine, rng: random.Random, rate: float) -> None:
        loop = asyncio.get_running_loop()

        def lose() -> None:
            self.lost += 1
            self._loads.take_down(engine.number)
            for call in engine.calls():
                self._deliver(call)
                engine.decoder.remove(call)
                if not call.done.done():
                    call.done.set_exception(EngineLost(f"engine {engine.number} is lost"))
            engine.look_again()
            loop.call_later(self._costs.failures.restart_s, come_back)

        def come_back() -> None:
            self._loads.bring_up(engine.number)
            self._any_up.set()
            loop.call_later(rng.expovariate(rate), lose)

        loop.call_later(rng.expovariate(rate), lose)
