"""Trainer and engines time-share the same GPUs, on fakes: which of them works when."""

from typing import Any

from asyncrl.engines.fake import FakeCheckpoints
from tests.unit.pipeline.harness import World

HOLDERS = ["trainer", "update", "engines"]


def colocated(**changes: Any) -> World:
    """A run whose parts record their work and check that the GPUs were theirs."""
    world = World(staleness=0, colocate=True, trains_during_updates=False, **changes)
    world.seen = seen = []  # type: ignore[attr-defined]

    def note(what: str, holder: str) -> None:
        seen.append(what)
        assert world.gpu_sharing is not None
        assert world.gpu_sharing.holder == holder, what

    make = world._parts  # noqa: SLF001

    def watched() -> Any:
        parts = make()
        train, publish, save = world.trainer.train, world.updater.publish, world.trainer.save
        generate = world.engine.generate

        async def trains(batch: Any) -> Any:
            note("train", "trainer")
            report = await train(batch)
            note("trained", "trainer")
            return report

        async def publishes(weights: Any) -> Any:
            note("publish", "update")
            return await publish(weights)

        async def saves(path: Any) -> None:
            note("save", "trainer")
            await save(path)

        async def generates(request: Any, on_chunk: Any) -> Any:
            note("generate", "engines")
            return await generate(request, on_chunk)

        world.trainer.train, world.updater.publish, world.trainer.save = trains, publishes, saves  # type: ignore[method-assign]
        world.engine.generate = generates  # type: ignore[method-assign]
        return parts

    world._parts = watched  # type: ignore[method-assign]  # noqa: SLF001
    return world


def test_engines_trainer_and_update_alternate_on_shared_gpus() -> None:
    world = colocated(steps=3).run()
    assert world.gpu_sharing is not None
    assert world.gpu_sharing.taken == [*HOLDERS * 3, "trainer"]  # the last one is for saving the model
    assert len(world.facts) == 3
    assert max(world.lags) == 0


def test_time_sharing_costs_its_switches_and_changes_nothing_else() -> None:
    apart = World(steps=3, staleness=0, trains_during_updates=False).run()
    shared = World(steps=3, staleness=0, trains_during_updates=False, colocate=True).run()
    assert shared.trained_ids == apart.trained_ids
    assert round(shared.seconds - apart.seconds, 6) == 1.0  # ten changes of 0.1 s


def test_a_checkpoint_is_copied_before_the_optimizer_is_offloaded() -> None:
    checkpoints = FakeCheckpoints(0.5)
    world = World(
        steps=4, staleness=0, colocate=True, trains_during_updates=False, save_interval=2, checkpoints=checkpoints
    )
    gpu_sharing = []
    begin = checkpoints.begin

    async def begins(step: int, run: Any) -> None:
        assert world.gpu_sharing is not None
        gpu_sharing.append(world.gpu_sharing.holder)
        await begin(step, run)

    checkpoints.begin = begins  # type: ignore[method-assign]
    world.run()
    assert gpu_sharing == ["trainer", "trainer"]
    assert sorted(checkpoints.written) == [2, 4]


def test_evaluations_end_before_the_trainer_takes_the_gpus() -> None:
    world = colocated(steps=4, held_out=40, slots=4, eval_interval=2, train_seconds=0.5).run()
    reports = [fact.evaluation for fact in world.facts if fact.evaluation is not None]
    assert [report.weights.step for report in reports] == [0, 2, 4]
    assert all(report.newest == report.weights and report.num_samples == 40 for report in reports)


def test_requests_that_outlive_a_step_wait_and_keep_their_tokens() -> None:
    """With ``mask`` a group continues when its step is over: it waits while the trainer works."""
    world = colocated(
        steps=12,
        slots=64,
        stale="mask",
        keep=_easier_later,
        lengths=lambda request: 400 if request.seed % 5 == 0 else 8,
    ).run()
    assert world.gpu_sharing is not None
    assert world.gpu_sharing.taken[:-1] == HOLDERS * 12
    stats = world.scheduler.stats()
    assert stats.aborts > 0
    assert stats.tokens.masked > 0
    assert max(world.lags) == 0


def _easier_later(group: Any) -> str | None:
    """Keep more of the later groups, so that more are kept than was estimated."""
    return "odd" if group.group_id < 40 and group.group_id % 4 else None
