"""The assembly of a run from its configuration.  Only this module and ``checks`` name the real engine and trainer.

checks.check ──▶ Checked ──▶ run_training: deploy, publish the first weights, train, save
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal, NoReturn
from uuid import uuid4

import orjson

from asyncrl.app.checks import Checked, check_served
from asyncrl.app.episodes import episode_load, running_episodes
from asyncrl.app.eval_function import running_eval_function
from asyncrl.app.evaluation import held_out_sets
from asyncrl.app.gc_tuning import freeze_startup_objects
from asyncrl.app.pipeline_settings import budgets, limits, policy, sampling
from asyncrl.app.rewards import reward_settings
from asyncrl.config import RunConfig
from asyncrl.config.areas.output import file_of_step
from asyncrl.config.derived import (
    dtype,
    lr_decay_iters,
    max_trainer_restarts,
    num_known_ids,
    num_steps_per_rollout,
    row_tokens,
    use_rollout_logprobs,
    use_routing_replay,
)
from asyncrl.config.passthrough import API_KEY
from asyncrl.data.streaming.stream import PromptStream
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.engines.cluster.deployment import Running, deployed, pick_device
from asyncrl.engines.cluster.ray_health import RayHealth
from asyncrl.engines.cluster.ray_trainer import RayCheckpointer
from asyncrl.engines.cluster.settings import Deployment, routes_shape
from asyncrl.engines.cluster.trainer_ranks import RankProcesses
from asyncrl.engines.megatron.checkpoint.held import SaveLease
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.sglang.launch import expert_parallel_size
from asyncrl.errors import AsyncRLError, GpuSharingFailed, LeaseLost, ServerFailed, WeightUpdateFailed, plainly
from asyncrl.event_loop import blocked_time, is_cancelled
from asyncrl.hooks.log_hooks import LogHooks
from asyncrl.hooks.prompt_source import UserPrompts
from asyncrl.metrics.facts import Gauges, StepFacts
from asyncrl.metrics.loop_lag import LoopLag, watch_loop
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.early_end import EarlyEnd
from asyncrl.pipeline.evaluation import Evaluates, Evaluator
from asyncrl.pipeline.function_evaluation import FunctionEvaluator
from asyncrl.pipeline.parts import Parts, RunPlan
from asyncrl.pipeline.recovery import journal_of
from asyncrl.pipeline.run import train
from asyncrl.pipeline.sampling.episode_settings import EpisodeSettings
from asyncrl.pipeline.sampling.kv_limit import follow_kv
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.quarantine import Quarantine
from asyncrl.pipeline.scheduling.quarantine_file import open_quarantine
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.protocols import GroupObserver, RewardFn
from asyncrl.rewards.resources import RewardResources
from asyncrl.rollout_log.saved_batches import SavedBatches
from asyncrl.task_groups import TaskGroup
from asyncrl.types import SamplingParams

Device = Literal["cpu", "cuda"]

logger = logging.getLogger(__name__)

LOOK_AT_KV_EVERY_S = 2.0
"""Seconds between measurements of the KV caches, which fill by a few per cent in that time.

One measurement costs an engine a millisecond.
"""
SHOW_EVERY_S = 5.0
"""Seconds between updates of the scheduler's counts in the live view."""
LAST_CHECKPOINT_S = 30.0
"""Seconds to wait for a checkpoint in progress when the run fails: 2 billion parameters at 1 GB/s."""
LOGS_FOLDER = "logs"
"""Folder in the run directory for the servers' logs."""
VERSIONS_FILE = "versions.json"
"""File in the run directory with the versions of packages and plug-ins."""
MODEL_FOLDER = "model"
"""Folder in the run directory for the final weights, in Hugging Face format."""


async def run_training(
    ray: ModuleType,
    checked: Checked,
    *,
    run_dir: Path,
    timeline: Timeline,
    phase: Callable[[str], None],
    report: Callable[[StepFacts], None],
    gauges: Callable[[Gauges], None],
    ending: AbstractContextManager[object],
    early_end: EarlyEnd,
    logs: LogHooks | None = None,
    lease: SaveLease | None = None,
) -> None:
    """Start all processes, train to the last step, save, and stop all processes.

    A run that is asked for its ``early_end`` saves a checkpoint instead.  ``phase`` receives the name of each startup
    phase, ``report`` each step's facts, and ``gauges`` the scheduler's counts every SHOW_EVERY_S seconds.  ``logs`` are
    the user's log functions, to which ``report`` hands the steps.  ``lease`` is that of ``--save``, and None without
    it.  The exit of ``ending`` tells that only the clean-up is left.  Raises the error that ended the run.
    """
    device = pick_device(ray, checked.run.cluster.device)
    check_served(checked.run.model.hf_checkpoint, checked.model.shape, device)
    serving, logs_folder = ServingWeights(checked.start.weights), run_dir / LOGS_FOLDER
    saved = checked.run.checkpoint
    quarantine, failed_rows = open_quarantine(
        checked.run.failures.max_row_failures,
        saved.save or run_dir,
        saved.load,
        by_content=isinstance(checked.prompts, UserPrompts),
    )
    health = RayHealth.of(ray)
    async with (
        checked.user_code.running(checked.run.episodes.plugin_processes, logs_folder) as user_processes,
        deployed(ray, deployment_of(checked, device, run_dir), phase) as running,
        RewardResources(reward_settings(checked.run), checked.reward, user_processes) as rewards,
        running_episodes(checked, user_processes, logs_folder, lambda: serving.now) as episodes,
    ):
        _record_plugins(run_dir / VERSIONS_FILE, running)
        parts = _parts(checked, running, rewards, timeline, serving, episodes, lease, quarantine, early_end)
        async with _failing_well(running, health), _journal(checked, lease, parts.scheduler):
            with ending, plainly(), blocked_time(parts.loop_lag.blocked_s):
                async with TaskGroup() as watchers:
                    watching = _watching(watchers, checked, running, rewards, parts, health)
                    holding = [] if lease is None else [watchers.create_task(lease.watch(), name="save-lease")]
                    watching.append(watchers.create_task(failed_rows.run(), name="failed-rows"))
                    watching += await _begin(watchers, running, parts, phase, gauges, logs)
                    await train(parts, _plan(checked, run_dir), report, lambda: _cancel(holding))
                    if health.problem:
                        raise ServerFailed(_with_checkpoint(health.problem, early_end))
                    if logs is not None:
                        await logs.finish()
                    _cancel((*watching, *holding))
        phase("stopping")


def _journal(checked: Checked, lease: SaveLease | None, scheduler: Scheduler) -> AbstractAsyncContextManager[None]:
    """Return the context in which the run writes its journal, if it has one."""
    notes, load = checked.start.journal_notes, checked.run.checkpoint.load
    if lease is None or notes is None:
        return nullcontext()
    continues = load is not None and load.resolve() == lease.claim.root.resolve()
    source = checked.prompts.at_start() if isinstance(checked.prompts, UserPrompts) else None
    return journal_of(scheduler, lease.claim.root, lease.claim.token, notes, has_groups=continues, source=source)


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks.

    The watch of the lease ends before the last save: the final weights do not depend on the lease, and the commit of
    the last checkpoint looks at it itself.
    """
    for task in tasks:
        task.cancel()


async def _begin(
    watchers: TaskGroup,
    running: Running,
    parts: Parts,
    phase: Callable[[str], None],
    gauges: Callable[[Gauges], None],
    logs: LogHooks | None,
) -> list[asyncio.Task[None]]:
    """Publish the first weights, and start the tasks that run beneath training from then on."""
    if running.has_trainer:
        phase("publishing the first weights")
        await running.serve(parts.serving.now)
    phase("generating the first batch")
    started: list[asyncio.Task[None]] = [watchers.create_task(_show(parts.scheduler, gauges), name="gauges")]
    if logs is not None:
        started.append(watchers.create_task(logs.run(), name="log-functions"))
    freeze_startup_objects()
    return started


def _watching(
    watchers: TaskGroup,
    checked: Checked,
    running: Running,
    rewards: RewardResources,
    parts: Parts,
    health: RayHealth,
) -> list[asyncio.Task[None]]:
    """Start the tasks that run beneath training, from before the first weights to the last step."""
    started: list[asyncio.Task[None]] = [
        watchers.create_task(running.watch(), name="servers"),
        watchers.create_task(_end_with_ray(health, parts.early_end, checked.run.failures.grace_s), name="ray"),
        watchers.create_task(watch_loop(parts.loop_lag), name="loop-lag"),
        watchers.create_task(rewards.warm(checked.rewards), name="reward-workers"),
    ]
    if isinstance(checked.prompts, PromptStream | UserPrompts):
        started.append(watchers.create_task(checked.prompts.run(), name="prompts"))
    if checked.run.rollout.follow_kv_cache:
        following = follow_kv(running.load_probe, parts.slots, LOOK_AT_KV_EVERY_S)
        started.append(watchers.create_task(following, name="kv-limit"))
    return started


async def _end_with_ray(health: RayHealth, early_end: EarlyEnd, grace_s: float) -> NoReturn:
    """Raise ServerFailed once GCS or the raylet has ended, after a grace in which the run may write a checkpoint.

    Actors answer for a minute after the end of GCS.
    """
    problem = await health.ended()
    if early_end.ask(problem, grace_s):
        await asyncio.sleep(grace_s)
    raise ServerFailed(_with_checkpoint(problem, early_end))


def _with_checkpoint(problem: str, early_end: EarlyEnd) -> str:
    saved = early_end.saved_step
    return problem if saved is None else f"{problem}; a checkpoint of {saved} steps was written"


def _record_plugins(path: Path, running: Running) -> None:
    """Add each engine's SGLang plug-ins to the file ``path``; null for an engine that did not report them."""
    plugins = {name: each and each.written() for name, each in sorted(running.plugins.items())}
    try:
        versions = orjson.loads(path.read_bytes())
        path.write_bytes(orjson.dumps({**versions, "plugins": plugins}, option=orjson.OPT_INDENT_2))
    except (OSError, orjson.JSONDecodeError) as error:
        logger.warning("%s: the engines' plug-ins were not written: %s", path, error)


async def _show(scheduler: Scheduler, gauges: Callable[[Gauges], None]) -> NoReturn:
    while True:
        await asyncio.sleep(SHOW_EVERY_S)
        gauges(scheduler.gauges())


@asynccontextmanager
async def _failing_well(running: Running, health: RayHealth) -> AsyncIterator[None]:
    """Handle a failure of the run before the processes are stopped.

    Wait up to LAST_CHECKPOINT_S for a checkpoint already being written.  The end of one of Ray's processes is a better
    cause than what follows from it.  After a failed weight update or handover of GPUs, look for a dead server, whose
    error is a better cause.  Skipped when the run was cancelled by a signal.
    """
    try:
        yield
    except Exception as error:
        if not is_cancelled():
            if running.trainer.has_begun_checkpoint and not isinstance(error, LeaseLost):
                logger.warning("the run failed; waiting up to %g s for a checkpoint: %s", LAST_CHECKPOINT_S, error)
                with suppress(AsyncRLError):
                    await running.trainer.finish_checkpoint(LAST_CHECKPOINT_S)
            if health.problem and health.problem not in str(error):
                raise ServerFailed(f"{health.problem}: {error}") from error
            if isinstance(error, WeightUpdateFailed | GpuSharingFailed):
                await running.look_for_the_dead()  # raises ServerFailed if a server died
        raise


def deployment_of(checked: Checked, device: Device, run_dir: Path) -> Deployment:
    """Return the deployment that a run asks for."""
    run = checked.run
    return Deployment(
        cluster=run.cluster,
        failures=run.failures,
        trainer=_trainer_settings(checked, device),
        server_flags=checked.model.server_flags,
        router_flags=run.router,
        logs=run_dir / LOGS_FOLDER,
        key=str(run.sglang.get(API_KEY) or secrets.token_urlsafe()),
        origin=checked.start.origin,
        pause_mode="retract" if run.rollout.weight_update_mode == "retract" else "in_place",
        disk=_disk(run, run_dir),
        has_trainer=not run.debug.debug_rollout_only,
        routes=routes_shape(checked.model.shape) if use_routing_replay(run, is_mixture=True) else None,
    )


def _trainer_settings(checked: Checked, device: Device) -> TrainerSettings:
    run = checked.run
    return TrainerSettings(
        model=run.model,
        shape=run.shape,
        train=run.train,
        parallel=run.parallel,
        device=device,
        dtype=dtype(run.model, device),
        temperature=run.rollout.rollout_temperature,
        num_steps_per_rollout=num_steps_per_rollout(run.train, run.rollout),
        use_rollout_logprobs=use_rollout_logprobs(run.train, run.rollout),
        timeout_s=60 * run.cluster.distributed_timeout_minutes,
        save_timeout_s=run.failures.train_timeout_s,
        row_tokens=row_tokens(run),
        num_expert_parts=_num_expert_parts(checked),
        lr_decay_iters=lr_decay_iters(run.train, run.rollout),
        reports_advantages=run.output.rollout_log_share > 0,
        custom=checked.custom,
    )


def _num_expert_parts(checked: Checked) -> int:
    """Return the number of parts into which weight updates by broadcast divide the experts."""
    run = checked.run
    if run.cluster.colocate or run.train.update_weight_disk_dir is not None:
        return 1
    return expert_parallel_size(checked.model.server_flags)


def _disk(run: RunConfig, run_dir: Path) -> Path | None:
    """Return a new, unique folder name for weight updates; the folder is removed when the run ends."""
    folder = run.train.update_weight_disk_dir
    return None if folder is None else folder.resolve() / f"asyncrl-weights-{run_dir.name}-{uuid4().hex[:8]}"


def _parts(
    checked: Checked,
    running: Running,
    rewards: RewardResources,
    timeline: Timeline,
    serving: ServingWeights,
    episodes: EpisodeSettings | None,
    lease: SaveLease | None,
    quarantine: Quarantine,
    early_end: EarlyEnd,
) -> Parts:
    run = checked.run
    num_slots = run.rollout.sglang_server_concurrency * run.cluster.num_engines
    slots = Slots(num_slots, episode_load(run, num_slots))
    engine = _engine(checked, running, serving)

    def sampler(
        sampling: SamplingParams, reward: RewardFn, tokenizer: TextTokenizer, *, is_training: bool = False
    ) -> Sampler:
        return Sampler(
            engine=engine,
            reward=reward,
            reward_timeout_s=run.failures.reward_timeout_s,
            tokenizer=tokenizer,
            sampling=sampling,
            slots=slots,
            serving=serving,
            timeline=timeline,
            seed=run.model.seed,
            episodes=episodes,
            is_training=is_training,
            num_top=num_known_ids(run.train, checked.model.shape.vocab_size) if is_training else 0,
            replays_routes=use_routing_replay(run, is_mixture=checked.model.shape.experts is not None),
            reward_outage_s=run.failures.reward_outage_s,
        )

    hooks, pattern = checked.hooks.batch_hooks(), run.debug.save_debug_rollout_data
    source = checked.prompts if isinstance(checked.prompts, UserPrompts) else None
    observers: list[GroupObserver] = [each for each in (hooks, source) if each is not None]
    training = sampler(
        sampling(checked.run.rollout, checked.end_tokens), checked.reward, checked.tokenizer, is_training=True
    )
    checkpointer = None if lease is None else _checkpointer(checked, running, lease)
    return Parts(
        scheduler=_scheduler(checked, training, rewards, slots, serving, timeline, observers, quarantine),
        evaluator=_evaluator(checked, running, sampler, slots, serving, timeline),
        engine=engine,
        trainer=running.trainer,
        updater=running.updater,
        slots=slots,
        serving=serving,
        timeline=timeline,
        loop_lag=LoopLag(),
        checkpointer=checkpointer,
        hooks=hooks if pattern is None else SavedBatches(partial(file_of_step, pattern), hooks),
        source=source,
        gpu_sharing=running.gpu_sharing,
        early_end=early_end,
        num_serving=lambda: len(running.engine.urls),
        scorers=running.engine.scorers,
        num_slow=lambda: running.supervisor.num_slow,
        trainer_processes=None if checkpointer is None else _trainer_processes(checked, running, checkpointer),
    )


def _trainer_processes(checked: Checked, running: Running, checkpointer: RayCheckpointer) -> RankProcesses:
    start = checked.start
    return RankProcesses(running.ranks, running.updater, checkpointer, origin=start.origin, first_step=start.step)


def _engine(checked: Checked, running: Running, serving: ServingWeights) -> RetryingEngine:
    engine = RetryingEngine(running.engine, checked.run.failures.max_sample_retries, lambda: serving.now)
    if (before := checked.start.before) is not None:
        engine.retries, engine.aborts = before.retries, before.aborts
    return engine


def _evaluator(
    checked: Checked,
    running: Running,
    sampler: Callable[[SamplingParams, RewardFn, TextTokenizer], Sampler],
    slots: Slots,
    serving: ServingWeights,
    timeline: Timeline,
) -> Evaluates | None:
    evaluation, function = checked.run.evaluation, checked.eval_function
    if evaluation.eval_interval is None:
        return None
    sets = held_out_sets(checked.held_out, checked.end_tokens, sampler)
    if function is None:
        return Evaluator(
            sets=sets,
            slots=slots,
            serving=serving,
            timeline=timeline,
            keeps_answers=checked.hooks.eval_log is not None,
        )
    return FunctionEvaluator(
        function=running_eval_function(
            function,
            lambda: running.url,
            running.key,
            [each.settings for each in checked.held_out],
            evaluation.eval_function_path,
        ),
        name=evaluation.eval_function_path or "",
        sets=sets,
        timeout_s=evaluation.eval_timeout_s,
        slots=slots,
        serving=serving,
        timeline=timeline,
    )


def _scheduler(
    checked: Checked,
    sampler: Sampler,
    rewards: RewardResources,
    slots: Slots,
    serving: ServingWeights,
    timeline: Timeline,
    observers: Sequence[GroupObserver],
    quarantine: Quarantine,
) -> Scheduler:
    run, start = checked.run, checked.start
    return Scheduler(
        prompts=checked.prompts,
        sampler=sampler,
        keep=checked.keep,
        limits=limits(run.rollout),
        budgets=budgets(run.failures),
        policy=policy(run.rollout),
        pick=checked.pick,
        hold=rewards,
        slots=slots,
        serving=serving,
        timeline=timeline,
        before=start.before,
        again=start.again,
        restored=start.restored,
        observers=observers,
        quarantine=quarantine,
    )


def _checkpointer(checked: Checked, running: Running, lease: SaveLease) -> RayCheckpointer:
    checkpoint, origin = checked.run.checkpoint, checked.start.origin
    return RayCheckpointer(
        running.trainer,
        lease.claim,
        with_optimizer=checkpoint.save_optim,
        about=checked.start.about,
        keep=checkpoint.keep_checkpoints,
        spared=None if origin is None else origin.folder,
    )


def _plan(checked: Checked, run_dir: Path) -> RunPlan:
    run, minutes = checked.run, checked.run.checkpoint.save_interval_minutes
    return RunPlan(
        num_steps=run.rollout.num_rollout,
        update_weights_interval=None if run.debug.debug_rollout_only else run.rollout.update_weights_interval,
        eval_interval=run.evaluation.eval_interval,
        eval_before_train=not run.evaluation.skip_eval_before_train,
        temperature=run.rollout.rollout_temperature,
        save_to=run_dir / MODEL_FOLDER,
        abort_for_updates=run.rollout.weight_update_mode == "abort",
        first_step=checked.start.step,
        save_interval=run.checkpoint.save_interval,
        skip_nonfinite_steps=run.failures.skip_nonfinite_steps,
        save_interval_s=None if minutes is None else 60 * minutes,
        save_during_training=run.checkpoint.async_save,
        max_failed_saves=run.failures.max_failed_saves,
        vocab_size=checked.model.shape.vocab_size,
        max_trainer_restarts=max_trainer_restarts(run),
    )
