"""``BroadcastUpdater`` with engines and a trainer that fail, hang or are slow."""

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater, Received, WeightReceiver
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.expert_parts import EngineParts
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.engines.weight_sync.round import GONE_S, PROBE_S, PauseMode
from asyncrl.errors import (
    AsyncRLError,
    EngineLost,
    EngineRejected,
    EngineTimeout,
    TrainerFailed,
    UpdateInterrupted,
    WeightUpdateFailed,
)
from asyncrl.types import UpdateReport, Weights
from tests.steps import Step, failing, hanging, nothing
from tests.unit.engines.weight_sync.recorders import PausableRecorder, Recorder, TwoBuckets
from tests.virtual_time import run_virtually


class Engine(PausableRecorder):
    """An engine that records its commands."""

    def __init__(
        self,
        url: str,
        num_ranks: int = 1,
        step: Step = nothing,
        *,
        records: bool = False,
        still_s: float | None = None,
        probed: Exception | None = None,
        not_replayed: tuple[str, ...] = (),
        parts: EngineParts | None = None,
    ) -> None:
        super().__init__(url, step)
        self._parts = parts
        self._probed = probed
        self.num_probes = 0
        self._still_s = still_s
        self._records = records
        self._not_replayed = not_replayed
        self.num_ranks = num_ranks

    async def probe(self, timeout_s: float) -> None:
        self.num_probes += 1
        if isinstance(self._probed, EngineTimeout):
            await asyncio.sleep(timeout_s)
        if self._probed is not None:
            raise self._probed

    async def join_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        await self._do(f"rank {rank_offset} of {world_size}")

    async def join_parts(self, *, rank_offset: int, world_size: int, group_name: str, backend: str) -> None:
        await self._do(f"{group_name}: from {rank_offset} of {world_size}")

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, label: str | None) -> Received:
        await self._do(f"{bucket.names[0]} {label}")
        return Received(is_recorded=self._records, still_s=None if label is None else self._still_s)

    async def receive_all(
        self, buckets: Sequence[WeightBucket], *, group_name: str, label: str, is_checked: bool, by_part: bool
    ) -> Received:
        names = " and ".join(bucket.names[0] for bucket in buckets)
        await self._do(f"{names} {label}{_how(is_checked=is_checked, by_part=by_part)}")
        return Received(is_recorded=True, still_s=self._still_s, not_replayed=self._not_replayed, parts=self._parts)


class Trainer(Recorder, TwoBuckets):
    """A trainer with two buckets that records its commands."""

    def __init__(
        self,
        step: Step = nothing,
        *,
        copies: bool = False,
        keeps: bool = True,
        parts: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """``parts`` are the expert parts of the two buckets."""
        super().__init__(step)
        self._parts = parts
        self.opened: list[str] = []
        """Names of the groups whose store it serves or has served."""
        self.within_s: list[float] = []
        self._copies = copies
        self._keeps = keeps

    async def open_group(self, *, master_address: str, master_port: int, group_name: str) -> None:
        await asyncio.sleep(0)
        self.opened.append(group_name)

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        await self._do("join")

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        buckets = await super().weight_buckets()
        return tuple(replace(bucket, expert_part=part) for bucket, part in zip(buckets, self._parts, strict=True))

    async def join_parts(self, *, num_parts: int, world_size: int, group_name: str, backend: str) -> None:
        await self._do(f"{group_name}: {num_parts} groups of {world_size}")

    async def snapshot(self, *, is_checked: bool, by_part: bool) -> bool:
        await self._do(f"snapshot{_how(is_checked=is_checked, by_part=by_part)}")
        return self._copies

    async def resend(self, *, is_checked: bool, by_part: bool) -> bool:
        await self._do(f"resend{_how(is_checked=is_checked, by_part=by_part)}")
        return self._keeps

    async def send(self, *, is_checked: bool, by_part: bool, timeout_s: float) -> None:
        self.within_s.append(timeout_s)
        await self._do(f"send{_how(is_checked=is_checked, by_part=by_part)}")

    async def abandon(self, group_name: str) -> None:
        await self._do(f"abandon {group_name}")


def _how(*, is_checked: bool, by_part: bool) -> str:
    return f"{' by part' if by_part else ''}{' checked' if is_checked else ''}"


async def a_port() -> int:
    return 1


def updater_of(
    membership: EngineMembership[WeightReceiver],
    trainer: Trainer,
    *,
    timeout_s: float = 5.0,
    pause_mode: PauseMode = "in_place",
    is_checked: bool = False,
    lost_s: float = 0.05,
) -> BroadcastUpdater:
    return BroadcastUpdater(
        membership,
        trainer,
        master_address="here",
        find_port=a_port,
        backend="gloo",
        timeout_s=timeout_s,
        lost_s=lost_s,
        pause_mode=pause_mode,
        is_checked=is_checked,
    )


def publish(
    *engines: Engine,
    trainer: Trainer,
    timeout_s: float = 5.0,
    pause_mode: PauseMode = "in_place",
    is_checked: bool = False,
    lost_s: float = 0.05,
    times: int = 1,
    membership: EngineMembership[WeightReceiver] | None = None,
) -> UpdateReport:
    """Publish weights ``times`` times; the report of the last update."""

    async def run() -> UpdateReport:
        updater = updater_of(
            membership or EngineMembership(engines),
            trainer,
            timeout_s=timeout_s,
            pause_mode=pause_mode,
            is_checked=is_checked,
            lost_s=lost_s,
        )
        await updater.connect()
        for version in range(3, 3 + times):
            await updater.snapshot()
            report = await updater.publish(Weights(version=version, step=6))
        return report

    return run_virtually(run())[0]


def failure(*engines: Engine, trainer: Trainer, timeout_s: float = 5.0) -> str:
    with pytest.raises(WeightUpdateFailed) as error:
        publish(*engines, trainer=trainer, timeout_s=timeout_s)
    return str(error.value)


def test_engines_pause_receive_every_bucket_and_continue_under_the_label_of_the_last() -> None:
    a, b = Engine("a", 2), Engine("b")
    report = publish(a, b, trainer=Trainer())
    assert a.told == ["rank 1 of 4", "pause in_place", "one None", "two 3", "continue"]
    assert b.told == ["rank 3 of 4", *a.told[1:]]
    assert report.num_bytes == 16


def test_every_engine_gets_the_pause_mode() -> None:
    a, b = Engine("a"), Engine("b")
    publish(a, b, trainer=Trainer(), pause_mode="retract")
    assert [engine.told[1] for engine in (a, b)] == ["pause retract"] * 2


def test_a_failure_names_the_engine_the_step_and_the_cause() -> None:
    said = failure(Engine("a"), Engine("b", step=failing("two 3", EngineLost("gone"))), trainer=Trainer())
    assert said == "sending the weights: b: gone"


def test_a_trainer_that_fails_is_named() -> None:
    assert failure(Engine("a"), trainer=Trainer(failing("join", TrainerFailed("boom")))).endswith("trainer: boom")
    assert "trainer: boom" in failure(Engine("a"), trainer=Trainer(failing("send", TrainerFailed("boom"))))


def test_a_silent_engine_is_named() -> None:
    said = failure(Engine("a"), Engine("b", step=hanging("one None")), trainer=Trainer(), timeout_s=0.1)
    assert said == "sending the weights: no answer from b within 0.2 s"  # 0.1 s for each bucket


def test_engines_continue_if_nothing_was_sent_and_stay_paused_otherwise() -> None:
    a = Engine("a")
    failure(a, Engine("b", step=failing("pause in_place", EngineLost("gone"))), trainer=Trainer())
    assert a.told[-2:] == ["pause in_place", "continue"]
    a = Engine("a")
    failure(a, trainer=Trainer(failing("send", TrainerFailed("boom"))))
    assert "continue" not in a.told


def test_engines_that_keep_buckets_receive_all_at_once_in_later_updates() -> None:
    a, b = Engine("a", records=True), Engine("b", records=True)
    publish(a, b, trainer=Trainer(), times=2)
    assert a.told[1:] == b.told[1:]
    assert a.told[1:] == [
        "pause in_place",
        "one None",
        "two 3",
        "continue",
        "pause in_place",
        "one and two 4",
        "continue",
    ]


def test_a_pause_begins_when_the_first_engine_reports_to_have_stood_still() -> None:
    """The update takes a second, in which a forward pass ends."""

    async def slow(step: str) -> None:
        await asyncio.sleep({"two 3": 1.0, "one and two 4": 1.0, "continue": 0.25}.get(step, 0.0))

    def told(*still_s: float | None, times: int) -> UpdateReport:
        engines = [Engine(str(each), step=slow, records=True, still_s=each) for each in still_s]
        return publish(*engines, trainer=Trainer(), times=times)

    for times in (1, 2):  # bucket by bucket, and all at once
        assert told(0.125, 0.5, times=times).pause_s == pytest.approx(0.75)
        assert told(0.125, 0.5, times=times).total_s == pytest.approx(1.25)
        assert told(0.125, None, times=times).pause_s == pytest.approx(1.25)


def test_buckets_whose_copies_are_incomplete_are_one_warning_for_each_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Engines repeat the message with every update; the run's log has the records of this logger."""
    a, b = Engine("a", records=True, not_replayed=("one",)), Engine("b", records=True)
    publish(a, b, trainer=Trainer(), times=3)
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("asyncrl.engines.weight_sync.broadcast", "WARNING")
    assert warning.getMessage().startswith("a: SGLang's loader did more for 1 bucket(s) than the copies")


def test_one_engine_that_does_not_keep_buckets_makes_all_receive_bucket_by_bucket() -> None:
    a, b = Engine("a", records=True), Engine("b")
    publish(a, b, trainer=Trainer(), times=2)
    assert a.told[-4:] == b.told[-4:] == ["pause in_place", "one None", "two 4", "continue"]


def test_a_trainer_that_sends_from_its_snapshot_is_not_told_to_send() -> None:
    trainer = Trainer(copies=True)
    publish(Engine("a"), trainer=trainer, times=2)
    assert trainer.told == ["join", "snapshot", "snapshot"]
    trainer = Trainer()
    publish(Engine("a"), trainer=trainer)
    assert trainer.told == ["join", "snapshot", "send"]


def test_only_updates_of_all_buckets_at_once_are_checked() -> None:
    engine, trainer = Engine("a", records=True), Trainer()
    publish(engine, trainer=trainer, times=2, is_checked=True)
    assert engine.told[-2] == "one and two 4 checked"
    assert trainer.told == ["join", "snapshot", "send", "snapshot checked", "send checked"]


def test_a_bug_is_not_an_update_failure() -> None:
    with pytest.raises(KeyError):
        publish(Engine("a", step=failing("pause in_place", KeyError("typo"))), trainer=Trainer())


def test_no_exception_group_is_raised() -> None:
    both = failing("pause in_place", EngineLost("gone"))
    with pytest.raises(AsyncRLError):
        publish(Engine("a", step=both), Engine("b", step=both), trainer=Trainer())


def test_a_lost_engine_interrupts_the_update_and_is_left_out_of_the_next_one() -> None:
    a, c = Engine("a", records=True), Engine("c", records=True)

    async def dies(step: str) -> None:
        if step.startswith("two"):
            membership.mark_lost("b")
            raise EngineLost("gone")

    b = Engine("b", step=dies)
    membership: EngineMembership[WeightReceiver] = EngineMembership((a, b, c))
    trainer = Trainer()
    with pytest.raises(UpdateInterrupted, match="b: gone"):
        publish(trainer=trainer, membership=membership)
    assert trainer.told == ["join", "snapshot", "send", "abandon asyncrl-0"]
    assert "continue" not in [*a.told, *c.told]
    publish(trainer=trainer, membership=membership)
    assert a.told[-5:] == ["rank 1 of 3", "pause in_place", "one None", "two 3", "continue"]
    assert c.told[-5:] == ["rank 2 of 3", *a.told[-4:]]
    assert "continue" not in b.told


def test_a_restarted_engine_joins_the_next_group_and_is_synced_after_it() -> None:
    a, b = Engine("a", records=True), Engine("b", records=True)
    membership: EngineMembership[WeightReceiver] = EngineMembership((a, b))
    membership.mark_lost("b")
    membership.mark_restarted("b")

    async def run() -> list[str]:
        updater = updater_of(membership, Trainer())
        await updater.connect()
        async with asyncio.timeout(1.0):
            await updater.wait_for_rejoined()
        for version in (1, 2):
            await updater.snapshot()
            await updater.publish(Weights(version=version, step=version))
        async with asyncio.timeout(1.0):
            await membership.wait_until_synced("b")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await updater.wait_for_rejoined()
        return b.told

    told = asyncio.run(run())
    assert told == [
        "rank 2 of 3",
        "pause in_place",
        "one None",
        "two 1",
        "continue",
        "pause in_place",
        "one and two 2",
        "continue",
    ]


def test_an_engine_that_is_restarted_while_others_resume_waits_for_the_next_update() -> None:
    async def a_starts_again(step: str) -> None:
        if step == "continue" and membership.num_changes == 0:
            membership.mark_lost("a")
            membership.mark_restarted("a")

    membership: EngineMembership[WeightReceiver] = EngineMembership((Engine("a"), Engine("b", step=a_starts_again)))

    async def run() -> None:
        updater = updater_of(membership, Trainer())
        await updater.connect()
        for version in (1, 2):
            await updater.snapshot()
            await updater.publish(Weights(version=version, step=version))
            async with asyncio.timeout(1.0):
                await (updater.wait_for_rejoined() if version == 1 else membership.wait_until_synced("a"))

    run_virtually(run())
    assert membership.num_changes == 2


def test_without_engines_training_continues_and_a_restarted_engine_gets_its_update() -> None:
    a = Engine("a", records=True)
    membership: EngineMembership[WeightReceiver] = EngineMembership((a,))
    trainer = Trainer()

    async def run() -> None:
        updater = updater_of(membership, trainer)
        await updater.connect()
        membership.mark_lost("a")
        assert await updater.snapshot()
        report = await updater.publish(Weights(version=1, step=1))
        assert (report.pause_s, report.num_bytes) == (0.0, 0)
        membership.mark_restarted("a")
        await updater.wait_for_rejoined()
        await updater.snapshot()
        await updater.publish(Weights(version=2, step=1))
        await membership.wait_until_synced("a")

    asyncio.run(run())
    assert a.told == ["rank 1 of 2", "rank 1 of 2", "pause in_place", "one None", "two 2", "continue"]
    assert trainer.told == ["join", "join", "snapshot", "send"]


def test_the_snapshot_is_resent_to_the_remaining_and_the_restarted_engines() -> None:
    dying = True

    async def dies(step: str) -> None:
        if dying and step.startswith("two"):
            membership.mark_lost("b")
            raise EngineLost("gone")

    a, b = Engine("a", records=True), Engine("b", step=dies, records=True)
    membership: EngineMembership[WeightReceiver] = EngineMembership((a, b))
    trainer = Trainer(copies=True)

    async def run() -> None:
        nonlocal dying
        updater = updater_of(membership, trainer)
        await updater.connect()
        assert not await updater.resnapshot()
        assert await updater.snapshot()
        with pytest.raises(UpdateInterrupted):
            await updater.publish(Weights(version=1, step=1))
        assert await updater.resnapshot()
        await updater.publish(Weights(version=2, step=1))
        dying = False
        membership.mark_restarted("b")
        assert await updater.resnapshot()
        await updater.publish(Weights(version=3, step=1))
        await membership.wait_until_synced("b")

    asyncio.run(run())
    assert trainer.told == ["join", "snapshot", "abandon asyncrl-0", "join", "resend", "join", "resend"]
    assert a.told[1:4] == ["pause in_place", "one None", "two 1"]
    assert a.told[4:9] == ["rank 1 of 2", "pause in_place", "one None", "two 2", "continue"]
    assert a.told[9:] == ["rank 1 of 3", "pause in_place", "one None", "two 3", "continue"]
    assert b.told[-5:] == ["rank 2 of 3", *a.told[-4:]]


def test_a_snapshot_that_cannot_be_resent_is_not_published_again() -> None:
    a = Engine("a")
    membership: EngineMembership[WeightReceiver] = EngineMembership((a,))
    trainer = Trainer(copies=True, keeps=False)

    async def run() -> None:
        updater = updater_of(membership, trainer)
        await updater.connect()
        for version in (1, 2):
            assert await updater.snapshot()
            await updater.publish(Weights(version=version, step=1))
            assert not await updater.resnapshot()

    asyncio.run(run())
    assert trainer.told == ["join", *["snapshot", "resend"] * 2]


def test_a_trainer_without_a_snapshot_is_not_asked_to_resend_it() -> None:
    a = Engine("a")
    membership: EngineMembership[WeightReceiver] = EngineMembership((a,))
    trainer = Trainer()

    async def run() -> None:
        updater = updater_of(membership, trainer)
        await updater.connect()
        assert not await updater.snapshot()
        await updater.publish(Weights(version=1, step=1))
        assert not await updater.resnapshot()

    asyncio.run(run())
    assert trainer.told == ["join", "snapshot", "send"]


def test_a_failure_of_engines_that_all_live_is_final() -> None:
    trainer = Trainer()
    with pytest.raises(WeightUpdateFailed) as error:
        publish(Engine("a", step=failing("two 3", EngineRejected("no memory"))), trainer=trainer)
    assert not isinstance(error.value, UpdateInterrupted)


@pytest.mark.parametrize("step", ["pause in_place", "one None", "two 3", "continue"])
def test_an_update_whose_connection_broke_starts_again_in_a_new_group(step: str) -> None:
    breaks = [True, True, False, True, True, True]
    outcomes: list[str] = []
    a, trainer = Engine("a"), Trainer()

    async def broken(what: str) -> None:
        if what == step and breaks.pop(0):
            raise EngineLost("connection reset")

    async def run() -> None:
        updater = updater_of(EngineMembership((a, Engine("b", step=broken))), trainer)
        await updater.connect()
        while breaks:
            await updater.snapshot()
            try:
                await updater.publish(Weights(version=3, step=6))
            except WeightUpdateFailed as error:
                outcomes.append(type(error).__name__)
            else:
                outcomes.append("published")

    run_virtually(run())
    again = ["UpdateInterrupted"] * 2
    assert outcomes == [*again, "published", *again, "WeightUpdateFailed"]
    names = [told.removeprefix("abandon ") for told in trainer.told if told.startswith("abandon ")]
    assert sorted(set(names)) == [f"asyncrl-{number}" for number in range(5)]
    assert trainer.told.count("join") == 5


def failed_after(
    engine: Engine, membership: EngineMembership[WeightReceiver], trainer: Trainer
) -> tuple[WeightUpdateFailed, float]:
    """The error of an update in which ``engine`` fails, and its seconds; an unresponsive engine dies in a second."""

    async def run() -> WeightUpdateFailed:
        updater = updater_of(membership, trainer, timeout_s=120.0, lost_s=30.0)
        await updater.connect()
        await updater.snapshot()
        async with asyncio.TaskGroup() as tasks:
            dying = tasks.create_task(dies())
            with pytest.raises(WeightUpdateFailed) as error:
                await updater.publish(Weights(version=3, step=6))
            dying.cancel()
        return error.value

    async def dies() -> None:
        why.append(await membership.wait_until_unresponsive(engine.url))
        await asyncio.sleep(1.0)
        membership.mark_lost(engine.url)

    why: list[str] = []
    error, seconds = run_virtually(run())
    assert why in ([], [f"lives and does not answer: {error}"], [f"cannot be reached: {error}"])
    return error, seconds


SILENT = EngineTimeout("silent")


def test_silent_engine_is_unresponsive_and_the_update_is_restarted() -> None:
    a, b = Engine("a"), Engine("b", step=hanging("one None"), probed=SILENT)
    membership: EngineMembership[WeightReceiver] = EngineMembership((a, b))
    trainer = Trainer()
    error, seconds = failed_after(b, membership, trainer)
    assert isinstance(error, UpdateInterrupted)
    assert str(error) == "sending the weights: no answer from b within 240 s"
    assert seconds == pytest.approx(242.0 + PROBE_S + 1.0)  # its deadline, a last probe, its death
    assert [engine.url for engine in membership.present] == ["a"]
    assert a.num_probes == b.num_probes == 1
    assert trainer.told[-2:] == [
        "abandon asyncrl-0",
        "abandon asyncrl-0",
    ]  # the first one releases the engines for the probes


@pytest.mark.parametrize(
    ("refused", "silent"),
    [("pause in_place", "continue"), ("pause in_place", "pause in_place"), ("continue", "continue")],
)
def test_an_engine_whose_command_may_still_arrive_is_ended_before_the_next_pause(refused: str, silent: str) -> None:
    a, b = Engine("a", step=failing(refused, EngineRejected("no"))), Engine("b", step=hanging(silent))
    membership: EngineMembership[WeightReceiver] = EngineMembership((a, b))

    async def run() -> tuple[str, float]:
        updater = updater_of(membership, Trainer(), lost_s=30.0)
        await updater.connect()
        await updater.snapshot()
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(ends())
            with pytest.raises(UpdateInterrupted, match="a: no"):
                await updater.publish(Weights(version=3, step=6))
        return ending.result(), asyncio.get_running_loop().time()

    async def ends() -> str:
        why = await membership.wait_until_unresponsive("b")
        await asyncio.sleep(1.0)
        membership.mark_lost("b")
        return why

    (why, seconds), _ = run_virtually(run())
    assert why == "does not answer a command to pause or to resume"
    assert seconds == pytest.approx(5.0 + 1.0)
    assert [engine.url for engine in membership.present] == ["a"]


def test_no_engine_is_ended_where_none_answers_the_command_to_resume() -> None:
    async def refuses(what: str) -> None:
        if what == "pause in_place":
            raise EngineLost("no way")
        await hanging("continue")(what)

    a, b = Engine("a", step=refuses), Engine("b", step=hanging("continue"))
    membership: EngineMembership[WeightReceiver] = EngineMembership((a, b))

    async def run() -> float:
        updater = updater_of(membership, Trainer(), timeout_s=60.0, lost_s=30.0)
        await updater.connect()
        await updater.snapshot()
        async with asyncio.TaskGroup() as tasks:
            ended = [tasks.create_task(membership.wait_until_unresponsive(url)) for url in ("a", "b")]
            with pytest.raises(UpdateInterrupted, match="pausing: a: no way"):
                await updater.publish(Weights(version=3, step=6))
            assert not any(task.done() for task in ended)
            for task in ended:
                task.cancel()
        return asyncio.get_running_loop().time()

    assert run_virtually(run())[0] == pytest.approx(60.0)


@pytest.mark.parametrize("probed", [None, EngineRejected("404")], ids=["they answer", "one has no probe"])
def test_a_failure_is_final_at_once_when_every_engine_answers_its_probe(probed: Exception | None) -> None:
    b = Engine("b", step=failing("one None", EngineRejected("no memory")), probed=probed)
    error, took_s = failed_after(b, EngineMembership((Engine("a"), b)), Trainer())
    assert not isinstance(error, UpdateInterrupted)
    assert took_s == 0.0


def no_way(number: int) -> EngineLost:
    """The error of a command for which no connection could be made, because of the error with this number."""
    error = EngineLost("no way")
    error.__cause__ = OSError(number, "no way")
    return error


@pytest.mark.parametrize(
    "probed", [EngineLost("answered 500"), no_way(errno.EMFILE)], ids=["it answers", "this machine has no files left"]
)
def test_an_engine_whose_probe_fails_for_another_reason_is_not_ended(probed: Exception) -> None:
    b = Engine("b", step=failing("pause in_place", EngineLost("no route")), probed=probed)
    error, took_s = failed_after(b, EngineMembership((Engine("a"), b)), Trainer())
    assert not isinstance(error, UpdateInterrupted)
    assert took_s == pytest.approx(30.0)


@pytest.mark.parametrize("others", [(Engine("a"),), (), (Engine("a", probed=no_way(errno.EHOSTUNREACH)),)])
def test_an_engine_on_a_machine_that_has_vanished_is_ended(others: tuple[Engine, ...]) -> None:
    """The supervisor does not find it dead: its question to that machine waits."""
    b = Engine("b", step=failing("pause in_place", EngineLost("no route")), probed=no_way(errno.EHOSTUNREACH))
    error, took_s = failed_after(b, EngineMembership((*others, b)), Trainer())
    assert isinstance(error, UpdateInterrupted)
    assert took_s == pytest.approx(GONE_S + 1.0)
    assert b.num_probes == 2


def test_an_engine_to_which_one_connection_broke_is_not_ended() -> None:
    class Flickering(Engine):
        async def probe(self, timeout_s: float) -> None:
            self.num_probes += 1
            if self.num_probes == 1:
                raise no_way(errno.ECONNRESET)

    b = Flickering("b", step=failing("one None", EngineRejected("no memory")))
    error, took_s = failed_after(b, EngineMembership((Engine("a"), b)), Trainer())
    assert not isinstance(error, UpdateInterrupted)
    assert took_s == pytest.approx(GONE_S)
    assert b.num_probes == 2


def test_an_engine_found_dead_meanwhile_ends_the_wait_for_its_probe() -> None:
    async def dies(step: str) -> None:
        if step == "one None":
            asyncio.get_running_loop().call_later(6.0, membership.mark_lost, "b")
            raise EngineLost("gone")

    b = Engine("b", step=dies, probed=SILENT)
    membership: EngineMembership[WeightReceiver] = EngineMembership((Engine("a"), b))
    error, took_s = failed_after(b, membership, Trainer())
    assert isinstance(error, UpdateInterrupted)
    assert took_s == pytest.approx(6.0)


@pytest.mark.parametrize("bug", [KeyError("typo"), TimeoutError("not ours")])
def test_a_bug_in_a_probe_is_raised_as_it_is(bug: Exception) -> None:
    b = Engine("b", step=failing("one None", EngineLost("gone")), probed=bug)
    with pytest.raises(type(bug)):
        publish(b, trainer=Trainer(), lost_s=30.0)


def test_a_group_is_formed_without_an_engine_that_does_not_join() -> None:
    a, b, c = Engine("a"), Engine("b", step=hanging("rank 2 of 3"), probed=SILENT), Engine("c")
    membership: EngineMembership[WeightReceiver] = EngineMembership((a, b, c))

    async def run() -> None:
        updater = updater_of(membership, Trainer(), timeout_s=1.0, lost_s=30.0)
        await updater.connect()
        membership.mark_lost("c")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dies())
            with pytest.raises(UpdateInterrupted, match="no answer from b within 1 s"):
                await updater.snapshot()
        assert not await updater.snapshot()

    async def dies() -> None:
        await membership.wait_until_unresponsive("b")
        membership.mark_lost("b")

    run_virtually(run())
    assert a.told == ["rank 1 of 4", "rank 1 of 3", "rank 1 of 2"]
    assert a.num_probes == 1


@pytest.mark.parametrize("found_after_s", [0.0, 5.0])
def test_no_member_waits_for_an_engine_that_dies_while_the_group_forms(found_after_s: float) -> None:
    """A trainer that still waits for it could join no other group for a minute, and neither could the engines."""

    async def dies(what: str) -> None:
        if what == "rank 2 of 3":
            if not found_after_s:
                membership.mark_lost("b")
            raise EngineLost("gone")

    a, b, c = Engine("a"), Engine("b", step=dies, probed=EngineLost("gone")), Engine("c")
    trainer, membership = Trainer(), EngineMembership[WeightReceiver]((a, b, c))

    async def run() -> None:
        updater = updater_of(membership, trainer, timeout_s=100.0, lost_s=30.0)
        await updater.connect()
        membership.mark_lost("c")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(found())
            with pytest.raises(UpdateInterrupted, match="gone"):
                await updater.snapshot()
        assert not await updater.snapshot()

    async def found() -> None:
        await asyncio.sleep(found_after_s)
        membership.mark_lost("b")

    run_virtually(run())
    first, *others = [what for what in trainer.told if what != "snapshot"]
    assert (first, others[0], others[-1]) == ("join", "join", "join")
    assert {*others[1:-1]} == {"abandon asyncrl-1"}


def test_engines_are_asked_to_join_once_the_trainer_serves_the_store() -> None:
    """A closed port then tells them that the group was given up."""

    async def step(what: str) -> None:
        opened_at[what] = [*trainer.opened]

    opened_at: dict[str, list[str]] = {}
    trainer, engine = Trainer(), Engine("a", step=step)

    async def run() -> None:
        await updater_of(EngineMembership[WeightReceiver]((engine,)), trainer).connect()

    asyncio.run(run())
    assert opened_at == {"rank 1 of 2": ["asyncrl-0"]}


def test_no_engine_is_unresponsive_where_none_answers() -> None:
    """The disk or the network of the engines is slow in this case, or the trainer hangs."""
    a, b = Engine("a", probed=SILENT), Engine("b", step=hanging("one None"), probed=SILENT)
    error, seconds = failed_after(b, EngineMembership((a, b)), Trainer())
    assert not isinstance(error, UpdateInterrupted)
    assert seconds == pytest.approx(242.0 + 30.0)


@pytest.mark.parametrize(
    ("trainer", "seconds"),
    [
        (nothing, 242.0 + PROBE_S + 1.0),
        (failing("abandon asyncrl-0", TrainerFailed("busy")), 242.0 + 30.0),
        (hanging("abandon asyncrl-0"), 242.0 + 30.0),
    ],
    ids=["given up", "the trainer refuses", "the trainer hangs"],
)
def test_only_engine_is_unresponsive_if_it_waits_for_no_other(trainer: Step, seconds: float) -> None:
    alone = Engine("a", step=hanging("one None"), probed=SILENT)
    error, took_s = failed_after(alone, EngineMembership((alone,)), Trainer(trainer))
    assert isinstance(error, UpdateInterrupted) is (trainer is nothing)
    assert took_s == pytest.approx(seconds)


def test_engines_with_weights_of_two_versions_stay_paused_when_the_next_pause_fails() -> None:
    pauses = 0

    async def step(what: str) -> None:
        nonlocal pauses
        pauses += what == "pause in_place"
        if (what == "one None" and pauses == 1) or (what == "pause in_place" and pauses == 2):
            raise EngineRejected("no")

    a, b = Engine("a"), Engine("b", step=step)

    async def run() -> None:
        updater = updater_of(EngineMembership((a, b)), Trainer())
        await updater.connect()
        for _ in range(2):
            await updater.snapshot()
            with pytest.raises(WeightUpdateFailed):
                await updater.publish(Weights(version=3, step=6))
        assert "continue" not in a.told
        await updater.snapshot()
        await updater.publish(Weights(version=3, step=6))
        assert a.told[-1] == "continue"

    run_virtually(run())


def test_the_search_for_lost_engines_can_be_cancelled() -> None:
    b = Engine("b", step=failing("one None", EngineLost("gone")), probed=SILENT)

    async def run() -> None:
        updater = updater_of(EngineMembership((Engine("a"), b)), Trainer(), lost_s=30.0)
        await updater.connect()
        await updater.snapshot()
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(updater.publish(Weights(version=3, step=6)))
            await asyncio.sleep(5.0)
            publishing.cancel()
        assert publishing.cancelled()

    assert run_virtually(run())[1] == pytest.approx(5.0)


def test_an_update_is_interrupted_also_when_the_trainer_cannot_abandon_it() -> None:
    async def dies(step: str) -> None:
        if step == "two 3":
            membership.mark_lost("a")
            raise EngineLost("gone")

    membership: EngineMembership[WeightReceiver] = EngineMembership((Engine("a", step=dies),))
    with pytest.raises(UpdateInterrupted, match="a: gone"):
        publish(trainer=Trainer(failing("abandon asyncrl-0", TrainerFailed("busy"))), membership=membership)


def test_a_trainer_has_as_long_to_send_as_the_engines_to_receive() -> None:
    trainer = Trainer()
    publish(Engine("a", records=True), trainer=trainer, times=2, timeout_s=5.0)
    assert trainer.within_s == [10.0, 5.0]


def test_a_snapshot_older_than_the_last_update_is_not_resent() -> None:
    a = Engine("a")
    membership: EngineMembership[WeightReceiver] = EngineMembership((a,))
    trainer = Trainer(copies=True)

    async def run() -> None:
        updater = updater_of(membership, trainer)
        await updater.connect()
        assert await updater.snapshot()
        await updater.publish(Weights(version=1, step=1))
        membership.mark_lost("a")
        assert await updater.snapshot()  # there is no engine to copy for
        membership.mark_restarted("a")
        assert not await updater.resnapshot()

    asyncio.run(run())
    assert "resend" not in trainer.told


def test_a_restarted_trainer_forms_another_group_and_has_no_snapshot_to_send_again() -> None:
    names: list[tuple[str, str]] = []

    class Naming(Trainer):
        async def join_engines(self, **where: Any) -> None:
            names.append((where["master_address"], where["group_name"]))

    async def run() -> None:
        engine, trainer = Engine("a"), Naming(copies=True)
        updater = BroadcastUpdater(
            EngineMembership([engine]), trainer, master_address="x", find_port=a_port, backend="gloo", timeout_s=1.0
        )
        await updater.connect()
        assert await updater.snapshot()
        await updater.publish(Weights(version=1, step=1))
        updater.trainer_restarted("y")
        assert not await updater.resnapshot()
        assert await updater.snapshot()
        await updater.publish(Weights(version=2, step=2))
        assert await updater.resnapshot()

    run_virtually(run())
    assert names == [("x", "asyncrl-0"), ("y", "asyncrl-1")]
