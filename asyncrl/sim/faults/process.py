"""One process of a life: the real parts of a run over the simulated world, from its start to its end."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from asyncrl.engines.cluster.calls import together
from asyncrl.engines.cluster.ray_trainer import RayCheckpointer, RayTrainer
from asyncrl.engines.cluster.router import RouterSupervisor, StartedRouter
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.cluster.supervisor import EngineSupervisor, StartedEngine
from asyncrl.engines.megatron.checkpoint.lease import Claim
from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater, WeightSender
from asyncrl.engines.weight_sync.disk import DiskUpdater, WeightWriter
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import EngineError, ServerFailed, UpdateInterrupted, plainly
from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.loop_lag import LoopLag
from asyncrl.metrics.timeline import NoTimeline
from asyncrl.pipeline.early_end import EarlyEnd
from asyncrl.pipeline.parts import Parts, RunPlan
from asyncrl.pipeline.recovery import journal_of
from asyncrl.pipeline.run import train
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.admission import Limits
from asyncrl.pipeline.scheduling.budgets import Budgets
from asyncrl.pipeline.scheduling.group_buffer import StalenessPolicy
from asyncrl.pipeline.scheduling.quarantine import Quarantine
from asyncrl.pipeline.scheduling.run_state import Restored
from asyncrl.protocols import Trainer, WeightUpdater
from asyncrl.sim.faults.history import Expected
from asyncrl.sim.faults.journal import SimJournal, SlowDisk
from asyncrl.sim.faults.loop import SIMULATED
from asyncrl.sim.faults.watched import WatchedEngine, WatchedPool, WatchedScheduler, WatchedUpdater
from asyncrl.sim.faults.world.collective import Collectives
from asyncrl.sim.faults.world.engine import SimEngine
from asyncrl.sim.faults.world.mortal import MortalTrainer, SimTrainerProcesses
from asyncrl.sim.faults.world.network import Network
from asyncrl.sim.faults.world.plan import Setting, Weather
from asyncrl.sim.faults.world.router import RouterProcess, SimRouter, started_router
from asyncrl.sim.faults.world.tokens import STOP
from asyncrl.sim.faults.world.trainer import SimTrainer
from asyncrl.sim.faults.world.users import NoText, Prompts, UserCode
from asyncrl.sim.faults.world.violation import Violation
from asyncrl.sim.faults.world.witness import RUN_SEED, Saved, Witness
from asyncrl.task_groups import TaskGroup
from asyncrl.types import Prompt, SamplingParams, Weights

REQUEST_S = 20.0
"""Longest silence of a request."""
CONTROL_S = 15.0
REWARD_S = 5.0
RESTART_S = 4.0
WATCHDOG_S = 500.0
OUTAGE_S = 300.0
GRACE_S = 60.0
"""Seconds after the end of training in which aborts in the background may end."""
LOOK_S = 0.5
"""Seconds between two looks at what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The content of a journal: the groups, the prompts that start again, and what the oracles expect."""

    restored: Restored
    again: tuple[Prompt, ...]
    expected: Expected


@dataclass(kw_only=True)
class Process:
    """One process, before it starts: ``main`` runs it."""

    setting: Setting
    weather: Weather
    claim: Claim
    weights_folder: Path
    quarantine: Quarantine
    before: Saved | None
    note: Callable[[str], None]
    origin: Path | None = None
    found: Found | None = None
    """The content of the journal since ``before``; None without one."""
    disk: SlowDisk | None = None
    """The disk of this process's journal; None without one."""
    facts: list[StepFacts] = field(default_factory=list)
    early_end: EarlyEnd = field(default_factory=EarlyEnd)

    def __post_init__(self) -> None:
        expected = self.found.expected if self.found else None
        again, kept = (expected.batches, expected.kept) if expected else ({}, frozenset())
        self.witness = Witness(self.setting, self.before, self.note, again, kept)
        self.journal: SimJournal | None = None
        self.network = Network(self.weather)
        self.collectives = Collectives(self.weather, lambda number: self.engines[number].netloc)
        self.engines = [
            SimEngine(number, self.setting, self.network, self.collectives, self.note)
            for number in range(self.setting.num_engines)
        ]
        self.router = SimRouter(self.network)
        self.is_done = False
        self.trainer: MortalTrainer | None = None

    async def main(self) -> None:
        """Run until the last step, an early end, or an error."""
        asyncio.get_running_loop().network = self.network  # type: ignore[attr-defined]
        for engine in self.engines:
            engine.start()
        async with HttpClient(open_session=self.network.session) as http:
            await self._run(http)
        await self._check_end()

    # ---- assembly

    async def _run(self, http: HttpClient) -> None:
        before = self.before.state if self.before else None
        first = Weights(version=before.version + 1, step=before.step) if before else Weights(version=0, step=0)
        self.serving = ServingWeights(first)
        self.slots = Slots(self.setting.num_slots)
        urls = tuple(engine.url for engine in self.engines)
        router = self._router(http, urls)
        self.pool = SGLangEngine(
            http,
            urls,
            router_url=None if router is None else router.url,
            request_timeout_s=REQUEST_S,
            interrupt_timeout_s=10.0,
        )
        self.trainer = MortalTrainer(
            lambda step: SimTrainer(self.setting, self.weather, self.collectives, self.witness, step),
            first.step,
            self.weather,
        )
        controls = [EngineControl(http, url, timeout_s=CONTROL_S) for url in urls]
        membership = EngineMembership(controls)
        updater = WatchedUpdater(await self._updater(membership), self.witness, self._serving_engines)
        supervisor = self._supervisor(http, controls, membership)
        parts = self._parts(updater)
        if self.found is not None:
            self.scheduler.check_recovered(self.found.expected)
        with plainly():
            async with self._journal():
                await self._train(parts, supervisor, router, updater, first)

    async def _train(
        self,
        parts: Parts,
        supervisor: EngineSupervisor,
        router: StartedRouter | None,
        updater: WatchedUpdater,
        first: Weights,
    ) -> None:
        with plainly():
            async with TaskGroup() as watchers:
                keeping = [supervisor.keep(), *([] if router is None else [RouterSupervisor(router, self.pool).keep()])]
                watching = watchers.create_task(_together(keeping), name="servers")
                await _serve(updater, first)
                await train(parts, self._plan(), self._report)
                watching.cancel()

    def _journal(self) -> contextlib.AbstractAsyncContextManager[None]:
        if self.disk is None:
            return contextlib.nullcontext()
        folder, epoch, notes = self.claim.root, self.claim.token, notes_of(self.setting)
        return journal_of(self.scheduler, folder, epoch, notes, has_groups=True, make=self._opened)

    def _opened(self, *args: Any, **options: Any) -> SimJournal:
        assert self.disk is not None, "there is a disk"
        note = self.scheduler.recording.note
        self.journal = SimJournal(*args, **options, disk=self.disk, note=note, say=self.note)
        self.scheduler.journal = self.journal
        return self.journal

    def _router(self, http: HttpClient, urls: tuple[str, ...]) -> StartedRouter | None:
        if not self.setting.has_router:
            return None
        self.router.start(urls)
        return started_router(RouterProcess(self.router), http, urls)

    def _serving_engines(self) -> Sequence[SimEngine]:
        return [engine for engine in self.engines if engine.url in self.pool.urls]

    async def _updater(self, membership: EngineMembership[Any]) -> WeightUpdater:
        pause_mode = "retract" if self.setting.mode == "retract" else "in_place"
        updater: Any
        if self.setting.by_disk:
            updater = DiskUpdater(
                membership,
                cast(WeightWriter, self.trainer),
                folder=self.weights_folder,
                timeout_s=CONTROL_S,
                pause_mode=cast(Any, pause_mode),
                silence_s=REQUEST_S,
            )
        else:
            updater = BroadcastUpdater(
                membership,
                cast(WeightSender, self.trainer),
                master_address="10.0.1.1",
                find_port=_a_port,
                backend="nccl",
                timeout_s=CONTROL_S,
                pause_mode=cast(Any, pause_mode),
            )
        await updater.connect()
        return cast(WeightUpdater, updater)

    def _supervisor(
        self, http: HttpClient, controls: Sequence[EngineControl], membership: EngineMembership[Any]
    ) -> EngineSupervisor:
        started = [
            StartedEngine(
                control=control,
                server=cast(Server, (process := EngineProcess(engine, http, self.weather))),
                start=process.start,
                probe_timeout_s=REQUEST_S,
            )
            for engine, control in zip(self.engines, controls, strict=True)
        ]
        by_url = {str(engine.number): engine for engine in self.engines}
        pool = WatchedPool(self.pool, self.serving, by_url, self.note)
        return EngineSupervisor(started, membership, pool, max_restarts=100)

    def _parts(self, updater: WatchedUpdater) -> Parts:
        engine = RetryingEngine(
            WatchedEngine(self.pool, self.witness, self.note), self.setting.retries, lambda: self.serving.now
        )
        if self.before is not None:
            engine.retries, engine.aborts = self.before.state.retries, self.before.state.aborts
        assert self.trainer is not None, "the trainer is made before the parts"
        timeline = NoTimeline()
        checkpointer = RayCheckpointer(
            cast(RayTrainer, self.trainer), self.claim, with_optimizer=True, about={}, keep=2, spared=self.origin
        )
        self.scheduler = self._scheduler(engine, timeline)
        return Parts(
            scheduler=self.scheduler,
            evaluator=None,
            engine=engine,
            trainer=cast(Trainer, self.trainer),
            updater=updater,
            slots=self.slots,
            serving=self.serving,
            timeline=timeline,
            loop_lag=LoopLag(),
            checkpointer=checkpointer,
            trainer_processes=None
            if self.disk is None
            else SimTrainerProcesses(self.trainer, updater, checkpointer, self._first_step),
            early_end=self.early_end,
            num_serving=lambda: len(self.pool.urls),
            scorers=self.pool.scorers,
        )

    def _scheduler(self, engine: RetryingEngine, timeline: NoTimeline) -> WatchedScheduler:
        setting, before = self.setting, self.before.state if self.before else None
        prompts = Prompts(setting.rows, before.prompts_taken if before else 0)
        user = UserCode(setting, self.weather)
        sampler = Sampler(
            engine=engine,
            reward=user.reward,
            reward_timeout_s=REWARD_S,
            tokenizer=NoText(),
            sampling=SamplingParams(
                temperature=setting.temperature,
                top_p=1.0,
                top_k=-1,
                max_new_tokens=setting.max_new_tokens,
                stop_token_ids=(STOP,),
            ),
            slots=self.slots,
            serving=self.serving,
            timeline=timeline,
            seed=RUN_SEED,
            is_training=True,
            reward_outage_s=OUTAGE_S,
        )
        return WatchedScheduler(
            self.witness,
            setting.rows,
            prompts=prompts,
            sampler=sampler,
            keep=user.keep,
            limits=Limits(
                groups_per_step=setting.groups_per_step,
                group_size=setting.group_size,
                max_staleness=setting.staleness,
                num_steps=setting.num_steps,
                over_sampling=setting.over_sampling,
            ),
            budgets=Budgets(
                max_failed_groups=20, max_filtered_groups=200, watchdog_timeout_s=WATCHDOG_S, reward_outage_s=OUTAGE_S
            ),
            slots=self.slots,
            serving=self.serving,
            timeline=timeline,
            policy=StalenessPolicy(stale=setting.stale, partial=setting.partial, mask_resumed=setting.mask_resumed),
            before=before,
            again=self._again(prompts),
            restored=self.found.restored if self.found else None,
            observers=(self.witness,),
            quarantine=self.quarantine,
        )

    def _again(self, prompts: Prompts) -> tuple[Prompt, ...]:
        if self.found is not None:
            return self.found.again
        return tuple(prompts.at(*each) for each in self.before.state.outstanding) if self.before else ()

    def _plan(self) -> RunPlan:
        setting = self.setting
        return RunPlan(
            num_steps=setting.num_steps,
            update_weights_interval=setting.interval,
            eval_interval=None,
            eval_before_train=False,
            temperature=setting.temperature,
            save_to=Path("model"),
            abort_for_updates=setting.mode == "abort",
            first_step=self._first_step,
            max_trainer_restarts=3,
            save_interval=setting.save_interval,
            skip_nonfinite_steps=1,
            save_during_training=setting.saves_in_background,
            vocab_size=STOP + 1,
        )

    @property
    def _first_step(self) -> int:
        return self.before.state.step if self.before else 0

    def _report(self, facts: StepFacts) -> None:
        self.facts.append(facts)

    # ---- the end

    async def _check_end(self) -> None:
        """Check that nothing is left: no task, request, slot, claim or group."""
        for _ in range(int(GRACE_S / LOOK_S)):  # a count, because the clock may jump meanwhile
            if not self._left_over():
                break
            await asyncio.sleep(LOOK_S)
        if left := self._left_over():
            raise Violation("nothing is left at the end", left)
        self.is_done = not self.early_end.is_asked
        if self.is_done:
            self.scheduler.check()
            self._check_accounts()

    def _check_accounts(self) -> None:
        groups = self.scheduler.gauges().groups
        if groups.in_flight or groups.partial or groups.buffered or groups.training or self.slots.claimed:
            raise Violation("nothing is left at the end", f"{groups}, {self.slots.claimed} claims")

    def _left_over(self) -> str:
        tasks = [
            task.get_name()
            for task in asyncio.all_tasks()
            if not task.get_name().startswith(SIMULATED) and not task.done()
        ]
        if tasks:
            return f"tasks {sorted(tasks)}"
        if self.slots.in_use:
            return f"{self.slots.in_use} slots in use"
        busy = [engine.number for engine in self.engines if engine.num_requests]
        return f"requests on engines {busy}" if busy and self.setting.aborts_on_disconnect else ""


class EngineProcess:
    """The supervisor's view of an engine's process, in the place of an actor's ``Server``."""

    def __init__(self, engine: SimEngine, http: HttpClient, weather: Weather) -> None:
        self.name = f"engine {engine.number}"
        self._engine = engine
        self._weather = weather
        self._http = http
        self._died = asyncio.Event()
        engine.on_death = self._died.set
        if not engine.is_up:  # it has died before anybody watched it
            self._died.set()

    async def watch(self) -> None:
        """Run until cancelled.  Raises ServerFailed once the process has ended."""
        await self._died.wait()
        await asyncio.sleep(0.2)
        raise ServerFailed(f"{self.name} ended")

    async def renew(self) -> None:
        """End the process, for which there must be a reason."""
        engine = self._engine
        is_healthy = engine.has_scheduler and not engine.is_stuck
        if is_healthy and not self._weather.may_seem_dead(engine.number):
            raise Violation("no healthy engine is ended", f"{self.name} is restarted")
        engine.die()
        await asyncio.sleep(0.1)

    async def start(self) -> EngineControl:
        """Start another process.  Raises ServerFailed."""
        await asyncio.sleep(RESTART_S)
        self._died.clear()
        self._engine.start()
        control = EngineControl(self._http, self._engine.url, timeout_s=CONTROL_S)
        try:
            await control.get_ready(60.0)
        except EngineError as error:
            raise ServerFailed(f"{self.name}: {error}") from error
        return control


def notes_of(setting: Setting) -> dict[str, Any]:
    """Return the notes of the journals of a life."""
    return {"rows": setting.rows}


async def _together(keeping: Sequence[Coroutine[Any, Any, None]]) -> None:
    await together(keeping)


async def _a_port() -> int:
    return 29500


async def _serve(updater: WatchedUpdater, weights: Weights) -> None:
    """Publish the first weights; start over if an engine is lost meanwhile."""
    while True:
        with contextlib.suppress(UpdateInterrupted):
            await updater.snapshot()
            await updater.publish(weights)
            return
