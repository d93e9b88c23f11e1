"""The whole pipeline on fakes and a virtual clock."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.engines.fake import (
    FakeCheckpoints,
    FakeEngine,
    FakeGpuSharing,
    FakePrompts,
    FakeTokenizer,
    FakeTrainer,
    FakeTrainerProcesses,
    FakeUpdater,
)
from asyncrl.errors import EngineError, plainly
from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.loop_lag import LoopLag
from asyncrl.metrics.timeline import NoTimeline, Timeline
from asyncrl.pipeline.early_end import EarlyEnd
from asyncrl.pipeline.evaluation import Evaluates, Evaluator, HeldOutSet
from asyncrl.pipeline.function_evaluation import FunctionEvaluator
from asyncrl.pipeline.parts import Parts, RunPlan
from asyncrl.pipeline.recovery import Recovery
from asyncrl.pipeline.run import train
from asyncrl.pipeline.sampling.episode_load import EpisodeLoad
from asyncrl.pipeline.sampling.episode_settings import EpisodeSettings
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.admission import Limits
from asyncrl.pipeline.scheduling.budgets import Budgets
from asyncrl.pipeline.scheduling.group_buffer import StalenessPolicy
from asyncrl.pipeline.scheduling.quarantine import Quarantine
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.types import Batch, Prompt, Request, Sample, SamplingParams, ScoredGroup, Weights
from tests.virtual_time import run_virtually


async def token_sum(prompt: Prompt, sample: Sample) -> float:
    """A reward that depends on the answer."""
    return float(sum(sample.token_ids) % 2)


def drawn(choices: Mapping[str, tuple[Any, ...]], draws: bytes) -> dict[str, Any]:
    """Choose one value for each name, by one byte each; zeros choose the first values, which should be the plainest.

    Draws are bytes because hypothesis prefers small numbers: of 2,000 histories 195 were not ``wait``, with bytes
    1,322.  It also shrinks bytes one by one, and is slow where it draws often.
    """
    return {name: places[draw % len(places)] for (name, places), draw in zip(choices.items(), draws, strict=True)}


@contextmanager
def named(plan: dict[str, Any]) -> Iterator[None]:
    """Add a note with ``plan``, as it was at the start, to every exception of the block."""
    before = dict(plan)
    try:
        yield
    except BaseException as error:
        error.add_note(f"with {before}")
        raise


def keep_all(group: ScoredGroup) -> str | None:
    """A filter that rejects nothing."""
    return None


def uneven(request: Request) -> int:
    """Lengths of 5 to 204 tokens."""
    return 5 + request.seed % 200


@dataclass(kw_only=True)
class World:
    """The settings of a run on fakes; a test changes its own subject, then calls ``run``."""

    steps: int = 4
    groups_per_step: int = 4
    group_size: int = 2
    staleness: int = 1
    interval: int | None = 1
    """Steps between weight updates; None: there are none."""
    make_trainer: Callable[..., Any] = FakeTrainer
    """Creates the trainer, from the arguments of a FakeTrainer."""
    slots: int = 16
    lengths: Callable[[Any], int] = lambda request: 8
    seconds_per_token: float = 0.01
    chunk: int = 20
    """Tokens that an engine delivers at once: few enough for several events per answer, enough to be fast."""
    train_seconds: float = 1.0
    update_seconds: float = 0.1
    trains_during_updates: bool = True
    interrupted_updates: int = 0
    keeps_copies: bool = True
    reward: Any = token_sum
    keep: Any = keep_all
    failures: dict[str, EngineError] = field(default_factory=dict)
    retries: int = 2
    max_failed_groups: int = 3
    max_filtered_groups: int = 50
    watchdog_s: float = 1000.0
    reward_outage_s: float = 1800.0
    quarantine: Quarantine | None = None
    spoils: Callable[[Batch], bool] = lambda batch: False
    """Whether the loss of a batch is not finite."""
    skips: int = 0
    """Such batches in a row that are skipped."""
    held_out: int = 0
    held_out_sets: dict[str, tuple[int, int, SamplingParams]] = field(default_factory=dict)
    """Sets by name, in the place of ``held_out``: number of prompts, answers per prompt, and sampling settings."""
    eval_rewards: dict[str, Any] = field(default_factory=dict)
    """Rewards of sets by name; ``reward`` for any other set."""
    eval_function: Any = None
    """A user's evaluation function, which replaces the built-in evaluation."""
    eval_timeout_s: float = 100.0
    max_new_tokens: int = 10_000
    top_p: float = 1.0
    grammar: str | None = None
    """A regular expression that limits the answers."""
    num_top: int = 0
    routes: Literal["chunks", "end"] | None = None
    """Whether the engine returns routes of experts, and when."""
    eval_interval: int | None = None
    rows: int = 1_000_000
    prompt_seconds: float = 0.0
    """Seconds between two prompts of the source."""
    over_sampling: int | None = None
    buffer_size: int | None = None
    stale: Any = "wait"
    partial: bool = False
    mask_resumed: bool = False
    abort: bool = False
    pick: Any = None
    hold: Any = None
    save_interval: int | None = None
    save_interval_s: float | None = None
    ends_early_s: float | None = None
    """Seconds after which the run is asked to end early."""
    checkpoints: FakeCheckpoints | None = None
    max_trainer_restarts: int | None = None
    """Restarts of the trainer between two steps; None: the trainer is not restarted."""
    failed_restarts: int = 0
    """The first restarts, which fail."""
    savings: Sequence[str] = ()
    """Ways in which the trainer's ranks can save memory."""
    max_failed_saves: int = 3
    timeline: Timeline = field(default_factory=NoTimeline)
    before: RunState | None = None
    recovery: Recovery | None = None
    """A run as its journal has it, in the place of ``before``."""
    journal: Any = None
    """A journal, which gets all events of the run."""
    colocate: bool = False
    hooks: Any = None
    keeps_answers: bool = True
    source: Any = None
    """A ``ResumableSource``, which is also the source of prompts and an observer."""
    observers: tuple[Any, ...] = ()
    scorers: Callable[[], Mapping[int, Any]] = dict
    """Returns the ``score`` of each of several engines, by number."""
    score: Any = None
    """A replacement of the engine's ``score``, which returns the log-probs of given tokens."""
    episode: Any = None
    """An ``EpisodeFn``, which generates the samples."""
    episode_timeout_s: float = 1000.0
    max_episodes: int | None = None
    """Four times the slots by default."""
    make_engine: Callable[..., Any] = FakeEngine
    """Creates the engine, from the arguments of a FakeEngine."""
    beneath: Callable[[], Coroutine[Any, Any, None]] | None = None
    """A coroutine function that runs beneath training until it is cancelled."""
    early_end: EarlyEnd = field(default_factory=EarlyEnd)
    facts: list[StepFacts] = field(default_factory=list)
    last_saves: list[tuple[int, int, int]] = field(default_factory=list)
    """Trained batches, reported steps and saved models when the last save was announced."""

    def run(self) -> "World":
        """Run to the end on a virtual clock; ``seconds`` is the time on it."""
        _, self.seconds = run_virtually(self.main())
        return self

    def make_updater(self) -> FakeUpdater:
        """Make the updater of ``engine``."""
        return FakeUpdater(self.engine, seconds=self.update_seconds, is_copied=self.trains_during_updates)

    async def main(self) -> None:
        """Run inside an event loop."""
        self.engine: FakeEngine = self.make_engine(
            self.lengths,
            seconds_per_token=self.seconds_per_token,
            chunk=self.chunk,
            failures=self.failures,
            routes=self.routes,
        )
        if self.score is not None:
            self.engine.score = self.score
        if self.recovery is not None:
            self.before = self.recovery.before
        self.trainer: FakeTrainer = self.make_trainer(self.train_seconds, self.spoils)
        self.updater = self.make_updater()
        self.gpu_sharing = FakeGpuSharing(self.engine) if self.colocate else None
        self.trainer_processes: FakeTrainerProcesses | None = None
        if self.max_trainer_restarts is not None:
            first = self.before.step if self.before else 0
            self.trainer_processes = FakeTrainerProcesses(
                self.trainer, self.updater, self.checkpoints, first_step=first, failures=self.failed_restarts
            )
            self.trainer_processes.savings += self.savings
        self.updater.interruptions = self.interrupted_updates
        self.updater.keeps_copies = self.keeps_copies
        self.prompts = FakePrompts(self.rows, self.before.prompts_taken if self.before else 0, self.prompt_seconds)
        plan = RunPlan(
            num_steps=self.steps,
            update_weights_interval=self.interval,
            eval_interval=self.eval_interval,
            eval_before_train=self.held_out > 0 or bool(self.held_out_sets),
            temperature=1.0,
            vocab_size=64,
            save_to=Path("model"),
            abort_for_updates=self.abort,
            first_step=self.before.step if self.before else 0,
            save_interval=self.save_interval,
            max_failed_saves=self.max_failed_saves,
            skip_nonfinite_steps=self.skips,
            save_interval_s=self.save_interval_s,
            max_trainer_restarts=self.max_trainer_restarts or 0,
        )
        if self.ends_early_s is not None:
            asyncio.get_running_loop().call_later(self.ends_early_s, self.early_end.ask, "SIGTERM", 10.0)
        source = [] if self.source is None else [self.source.run]
        beneath = [*source, *([] if self.beneath is None else [self.beneath])]
        with plainly():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(each()) for each in beneath]
                parts = self._parts()
                if self.journal is not None:
                    state = None if self.source is None else self.source.at_start()
                    has_groups = self.recovery is not None
                    await self.scheduler.begin_journal(self.journal, {}, has_groups=has_groups, source=state)
                await train(parts, plan, self.facts.append, self._note_last_save)
                for task in running:
                    task.cancel()

    def _note_last_save(self) -> None:
        self.last_saves.append((len(self.trainer.batches), len(self.facts), len(self.trainer.saved)))

    def request(self, request_id: str, prompt: Prompt, seed: int, step: int) -> Request:
        """A request as the sampler makes it."""
        return Request(
            request_id=request_id,
            token_ids=prompt.token_ids,
            sampling=self._sampling(),
            seed=seed,
            weights=Weights(version=step, step=step),
        )

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0,
            top_p=self.top_p,
            top_k=-1,
            max_new_tokens=self.max_new_tokens,
            extra={} if self.grammar is None else {"regex": self.grammar},
        )

    def _parts(self) -> Parts:
        timeline = self.timeline
        most = 4 * self.slots if self.max_episodes is None else self.max_episodes
        slots = self.all_slots = Slots(self.slots, None if self.episode is None else EpisodeLoad(most))
        episodes = self.episode and EpisodeSettings(function=self.episode, timeout_s=self.episode_timeout_s)
        before = self.before
        first = Weights(version=before.version + 1, step=before.step) if before else Weights(version=0, step=0)
        serving = ServingWeights(first)
        self.engine.continue_generation(first)
        engine = RetryingEngine(self.engine, self.retries, lambda: serving.now)

        def sampler_of(sampling: SamplingParams, reward: Any, *, is_training: bool = False) -> Sampler:
            return Sampler(
                engine=engine,
                reward=reward,
                reward_timeout_s=60.0,
                tokenizer=FakeTokenizer(),
                sampling=sampling,
                slots=slots,
                serving=serving,
                timeline=timeline,
                seed=1,
                episodes=episodes,
                is_training=is_training,
                num_top=self.num_top if is_training else 0,
                replays_routes=self.routes is not None,
                reward_outage_s=self.reward_outage_s,
            )

        self.scheduler = Scheduler(
            prompts=self.prompts if self.source is None else self.source,
            sampler=sampler_of(self._sampling(), self.reward, is_training=True),
            keep=self.keep,
            limits=Limits(
                groups_per_step=self.groups_per_step,
                group_size=self.group_size,
                max_staleness=self.staleness,
                num_steps=self.steps,
                over_sampling=self.over_sampling,
                buffer_size=self.buffer_size,
            ),
            policy=StalenessPolicy(stale=self.stale, partial=self.partial, mask_resumed=self.mask_resumed),
            pick=self.pick,
            hold=self.hold,
            budgets=Budgets(
                max_failed_groups=self.max_failed_groups,
                max_filtered_groups=self.max_filtered_groups,
                watchdog_timeout_s=self.watchdog_s,
                reward_outage_s=self.reward_outage_s,
            ),
            slots=slots,
            serving=serving,
            timeline=timeline,
            before=before,
            again=self._again(),
            restored=None if self.recovery is None else self.recovery.restored,
            quarantine=self.quarantine,
            observers=(*self.observers, *(each for each in (self.hooks, self.source) if each is not None)),
        )
        prompts = FakePrompts()
        wanted = self.held_out_sets or {"held": (self.held_out, 1, self._sampling())}
        held_out = [
            HeldOutSet(
                name=name,
                prompts=tuple(prompts.at(0, row) for row in range(rows)),
                samples_per_prompt=each,
                sampler=sampler_of(sampling, self.eval_rewards.get(name, self.reward)),
            )
            for name, (rows, each, sampling) in wanted.items()
        ]
        return Parts(
            scheduler=self.scheduler,
            evaluator=self._evaluator(held_out, slots, serving, timeline)
            if self.held_out or self.held_out_sets
            else None,
            engine=engine,
            trainer=self.trainer,
            updater=self.updater,
            slots=slots,
            serving=serving,
            timeline=timeline,
            loop_lag=LoopLag(),
            checkpointer=self.checkpoints,
            gpu_sharing=self.gpu_sharing,
            hooks=self.hooks,
            source=self.source,
            early_end=self.early_end,
            scorers=self.scorers,
            trainer_processes=self.trainer_processes,
        )

    def _evaluator(
        self, sets: Sequence[HeldOutSet], slots: Slots, serving: ServingWeights, timeline: Timeline
    ) -> Evaluates:
        if self.eval_function is None:
            keeps = self.keeps_answers
            return Evaluator(sets=sets, slots=slots, serving=serving, timeline=timeline, keeps_answers=keeps)
        return FunctionEvaluator(
            function=self.eval_function,
            name="mine",
            sets=sets,
            timeout_s=self.eval_timeout_s,
            slots=slots,
            serving=serving,
            timeline=timeline,
        )

    def _again(self) -> tuple[Prompt, ...]:
        if self.before is None:
            return ()
        if self.recovery is not None:
            return self.recovery.again
        return self.before.prompts or tuple(self.prompts.at(*which) for which in self.before.outstanding)

    @property
    def lags(self) -> Sequence[int]:
        """The lag in steps of every span with a trained token."""
        return [
            batch.step - span.weights.step
            for batch in self.trainer.batches
            for group in batch.groups
            for scored in group.samples
            for span in scored.sample.spans
            if any(scored.loss_mask[span.start : span.stop])
        ]

    @property
    def trained_ids(self) -> list[list[int]]:
        """Group ids by batch."""
        return [[group.group_id for group in batch.groups] for batch in self.trainer.batches]
