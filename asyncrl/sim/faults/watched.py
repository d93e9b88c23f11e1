"""Real parts of the run with a witness: each does its work unchanged, and shows it to the oracles."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.metrics.facts import Gauges
from asyncrl.pipeline.sampling.sampler import ServingWeights
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.protocols import RolloutEngine, WeightUpdater
from asyncrl.sim.faults.history import Accounts, Expected, Recording
from asyncrl.sim.faults.journal import SimJournal
from asyncrl.sim.faults.world.engine import SimEngine
from asyncrl.sim.faults.world.tokens import MIXED
from asyncrl.sim.faults.world.violation import Violation
from asyncrl.sim.faults.world.witness import Witness
from asyncrl.types import Batch, Chunk, FinishReason, GroupId, Request, SourceState, UpdateReport, Weights


class WatchedEngine:
    """``RolloutEngine`` that counts the delivered tokens."""

    def __init__(self, engine: RolloutEngine, witness: Witness, note: Callable[[str], None]) -> None:
        self._engine = engine
        self._witness = witness
        self._note = note

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``."""
        is_over = False
        self._witness.asked(request.request_id)

        def deliver(chunk: Chunk) -> None:
            if is_over:
                raise Violation("no chunk after the end", request.request_id)
            on_chunk(chunk)
            self._witness.delivered(chunk)

        try:
            reason = await self._engine.generate(request, deliver)
        except BaseException as error:
            self._note(f"{request.request_id}: {type(error).__name__} {error}")
            raise
        finally:
            is_over = True
        self._note(f"{request.request_id}: {reason.value}")
        return reason

    async def interrupt(self) -> None:
        """See ``RolloutEngine.interrupt``."""
        await self._engine.interrupt()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``."""
        return await self._engine.score(token_ids, start)


class WatchedUpdater:
    """``WeightUpdater`` that looks at the engines after each update."""

    def __init__(self, updater: WeightUpdater, witness: Witness, serving: Callable[[], Sequence[SimEngine]]) -> None:
        """``serving`` returns the engines that get requests."""
        self._updater = updater
        self._witness = witness
        self._serving = serving

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``."""
        return await self._updater.snapshot()

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``."""
        return await self._updater.resnapshot()

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``."""
        self._witness.publishing(weights)
        report = await self._updater.publish(weights)
        for engine in self._serving():
            if engine.is_up and (engine.step, engine.label) != (weights.step, str(weights.version)):
                found = f"engine {engine.number} has step {engine.step} as {engine.label!r}"
                raise Violation("engines serve what was published", f"{weights}: {found}")
        return report

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``."""
        self._updater.trainer_restarted(address)

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await self._updater.wait_for_rejoined()


class WatchedPool:
    """The supervisor's view of the requests' pool, with a look at each engine that rejoins."""

    def __init__(
        self, pool: SGLangEngine, serving: ServingWeights, engines: Mapping[str, SimEngine], note: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._serving = serving
        self._engines = engines
        self._note = note

    def leave(self, url: str) -> None:
        """See ``Pool.leave``."""
        self._note(f"{url} leaves")
        self._pool.leave(url)

    async def drain(self, url: str) -> None:
        """See ``Pool.drain``."""
        await self._pool.drain(url)

    def join(self, url: str) -> None:
        """See ``Pool.join``."""
        self._note(f"{url} joins")
        engine = next(each for each in self._engines.values() if each.url == url)
        if engine.is_up and (engine.step == MIXED or int(engine.label) < self._serving.now.version):
            raise Violation(
                "engines serve what was published", f"{url} rejoins with {engine.label!r}, not {self._serving.now}"
            )
        self._pool.join(url)

    def move(self, url: str, new_url: str) -> None:
        """See ``Pool.move``."""
        self._pool.move(url, new_url)

    async def route(self, url: str) -> None:
        """See ``Pool.route``."""
        await self._pool.route(url)

    async def forget(self, url: str) -> None:
        """See ``Pool.forget``."""
        await self._pool.forget(url)


_RECORDED_FIRST = ("reject", "unpick", "expire", "train")
"""Events that are recorded before the accounts have them."""


class WatchedScheduler(Scheduler):
    """The scheduler, with a check of all accounts at each step."""

    def __init__(self, witness: Witness, rows: int, **options: Any) -> None:
        super().__init__(**options)
        self._witness = witness
        self._rows = rows
        self.journal: SimJournal | None = None
        """Set before ``begin_journal``."""
        self.recording = Recording(self._look, lambda: witness.settled.copy(), self._finished)
        for name in _RECORDED_FIRST:
            setattr(self._accounts, name, self._closing(getattr(self._accounts, name)))

    async def next_batch(self) -> Batch:
        """See ``Scheduler.next_batch``."""
        batch = await super().next_batch()
        if self.journal is not None:
            self.recording.took(batch)
            self._witness.took(batch, self.journal.has)
        return batch

    def _look(self) -> tuple[Accounts, int]:
        ledger = self._accounts._ledger  # noqa: SLF001 (between two events, in which no account need balance)
        return (ledger.tokens(0), ledger.groups()), self._prompt_queue.num_taken

    def _finished(self) -> frozenset[GroupId]:
        return frozenset(self._buffer.groups().keys() | self._recorder.waiting)

    def _closing(self, act: Callable[..., None]) -> Callable[..., None]:
        def close(*args: Any, **options: Any) -> None:
            num_before = len(self.recording.entries)
            act(*args, **options)
            if len(self.recording.entries) > num_before:  # the journal may be off
                self.recording.close_last()

        return close

    def close_step(self, *, is_skipped: bool = False) -> None:
        """See ``Scheduler.close_step``."""
        super().close_step(is_skipped=is_skipped)
        self.check()

    def state(self, source: SourceState | None = None) -> RunState:
        """See ``Scheduler.state``."""
        state = super().state(source)
        self._witness.asked_for_state(state, self._rows)
        return state

    def check(self) -> None:
        """Check the accounts.  Raises Violation."""
        self._witness.check_tokens(self._balanced().tokens.generated)

    def check_recovered(self, expected: Expected) -> None:
        """Check the accounts before the run begins, which recovers from a journal.  Raises Violation."""
        expected.check(self._balanced(), self._prompt_queue.num_taken)

    def _balanced(self) -> Gauges:
        try:
            return self.gauges()
        except AssertionError as error:
            raise Violation("ledger", str(error)) from error
