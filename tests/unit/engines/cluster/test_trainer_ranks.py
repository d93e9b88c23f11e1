"""Ranks that die or hang are found, and others with the newest checkpoint take their place."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.engines.cluster import trainer_ranks
from asyncrl.engines.cluster.addresses import Addresses
from asyncrl.engines.cluster.placement import Placement
from asyncrl.engines.cluster.ray_trainer import RayCheckpointer, RayTrainer
from asyncrl.engines.cluster.settings import Deployment
from asyncrl.engines.cluster.trainer_ranks import RankProcesses, TrainerRanks
from asyncrl.engines.gather import ask_one
from asyncrl.engines.megatron.checkpoint.directory import Origin, folder_of
from asyncrl.engines.megatron.checkpoint.lease import Claim
from asyncrl.errors import ServerFailed, TrainerFailed, WeightUpdateFailed
from asyncrl.protocols import WeightUpdater
from tests.virtual_time import run_virtually


class Actor:
    """An actor of a rank that records its calls."""

    def __init__(self, rank: int, answers: Callable[[str], Any]) -> None:
        self.rank = rank
        self.calls: list[str] = []
        self.is_killed = False
        self.settings: Any = None
        """Those with which the rank was started."""
        self._answers = answers

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Any:
            name = str(args[0]) if method == "call" else method
            self.calls.append(name)
            if method == "start":
                self.settings = args[0]
            return self._answer(name)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))

    async def _answer(self, name: str) -> Any:
        if self.is_killed:
            raise RayActorError
        found = self._answers(name)
        if isinstance(found, Exception):
            raise found
        if found == "hangs":
            await asyncio.Event().wait()
        return found


class Place:
    """A placement that makes recording actors."""

    def __init__(self) -> None:
        self.made: list[Actor] = []
        self.answers: Callable[[str], Any] = lambda name: (20_000,) if name == "free_ports" else "local"

    def rank(self, kind: type, rank: int) -> Actor:
        self.made.append(Actor(rank, lambda name: self.answers(name)))
        return self.made[-1]

    def kill(self, actor: Actor) -> None:
        actor.is_killed = True


def ranks(place: Place, count: int = 2) -> TrainerRanks:
    """Some ranks with short deadlines."""
    deployment = SimpleNamespace(
        failures=SimpleNamespace(train_timeout_s=60.0, control_timeout_s=15.0),
        layout=SimpleNamespace(num_ranks=count),
        cluster=SimpleNamespace(start_timeout_s=30.0),
        trainer=SimpleNamespace(train=SimpleNamespace(check_fast_step=False)),
    )
    addresses = Addresses(is_single_node=True, timeout_s=30.0)
    made = TrainerRanks(cast(Placement, place), cast(Deployment, deployment), addresses)
    made.create()
    return made


def test_living_ranks_are_not_lost() -> None:
    assert run_virtually(ranks(Place()).find_lost()) == (None, 0.0)


def test_a_dead_rank_is_found_within_a_second_while_it_is_idle() -> None:
    async def run() -> str:
        place = Place()
        ours = ranks(place)
        asyncio.get_running_loop().call_later(10.5, place.kill, place.made[1])
        return await ours.wait_until_lost()

    why, seconds = run_virtually(run())
    assert why.startswith("trainer rank 1: ")
    assert seconds == 11.0


def test_a_stopped_rank_is_found_after_the_deadline_of_a_ping() -> None:
    place = Place()
    ours = ranks(place)
    place.answers = lambda name: "hangs"
    assert run_virtually(ours.wait_until_lost()) == ("trainer rank 0: no answer within 15 s", 16.0)
    assert run_virtually(ours.find_lost())[0] == "trainer rank 0: no answer within 10 s"


def test_a_rank_that_was_silent_in_a_weight_update_is_lost_though_it_answers_pings() -> None:
    async def run() -> None:
        place = Place()
        ours = ranks(place)
        place.answers = lambda name: "hangs" if name == "snapshot" else (20_000,)
        copying = ours.trainer.snapshot(is_checked=False, by_part=False)
        with pytest.raises(WeightUpdateFailed, match=r"copying the weights: trainer: .* no answer within 15 s"):
            await ask_one("copying the weights", "trainer", copying, 15.0)
        assert await ours.find_lost() == "trainer rank 0, snapshot: no answer within 15 s"

    run_virtually(run())


def test_a_dead_rank_without_an_address_is_a_failure_of_the_trainer() -> None:
    place = Place()
    ours = ranks(place)
    place.kill(place.made[0])
    with pytest.raises(TrainerFailed, match="trainer rank 0: "):
        run_virtually(ours.address())


def test_a_rank_that_was_silent_in_a_call_is_lost_though_it_answers_pings_and_others_take_its_place() -> None:
    async def run() -> None:
        place = Place()
        ours = ranks(place)
        place.answers = lambda name: "hangs" if name == "put_away_weights" else (20_000,)
        with pytest.raises(TrainerFailed, match="no answer within 15 s"):
            await ours.trainer.put_away_weights()
        assert await ours.find_lost() == "trainer rank 0, put_away_weights: no answer within 15 s"
        await ours.restart(None)
        assert await ours.find_lost() is None
        old, new = place.made[:2], place.made[2:]
        assert all(actor.is_killed for actor in old)
        assert not any(actor.is_killed for actor in new)
        assert [actor.calls for actor in new] == [["free_ports", "start", "ping"], ["start", "ping"]]

    run_virtually(run())


def test_ranks_that_save_memory_start_with_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    savings = iter([("smaller", "max-tokens-per-gpu 512"), None])
    monkeypatch.setattr(trainer_ranks, "less_memory", lambda settings: next(savings))
    monkeypatch.setattr(trainer_ranks, "replace", lambda deployment, trainer: replaced(deployment, trainer))

    def replaced(deployment: Any, trainer: Any) -> Any:
        return SimpleNamespace(**{**vars(deployment), "trainer": trainer})

    async def run() -> None:
        place = Place()
        ours = ranks(place)
        assert ours.save_memory() == "max-tokens-per-gpu 512"
        await ours.restart(None)
        assert [actor.settings for actor in place.made] == [None, None, "smaller", "smaller"]
        assert ours.save_memory() is None

    run_virtually(run())


def test_ranks_that_answer_again_are_not_lost() -> None:
    async def run() -> None:
        place = Place()
        ours = ranks(place)
        place.answers = lambda name: "hangs" if name == "fetch" else None
        with pytest.raises(TrainerFailed):
            await ours.trainer.fetch()
        await ours.trainer.put_away_weights()
        assert await ours.find_lost() is None

    run_virtually(run())


def test_an_error_of_the_ranks_code_is_no_loss() -> None:
    async def run() -> None:
        place = Place()
        ours = ranks(place)
        failure = RayTaskError("train", "traceback", ValueError("in the user's loss"))
        place.answers = lambda name: failure if name == "fetch" else None
        with pytest.raises(TrainerFailed, match="ValueError: in the user's loss"):
            await ours.trainer.fetch()
        assert await ours.find_lost() is None

    run_virtually(run())


def test_an_answer_of_old_ranks_says_nothing_about_new_ones() -> None:
    async def run() -> None:
        place = Place()
        ours = ranks(place)
        place.answers = lambda name: "hangs" if name == "fetch" else (20_000,)
        waiting = asyncio.get_running_loop().create_task(ours.trainer.fetch())
        await asyncio.sleep(1.0)
        await ours.restart(None)
        with pytest.raises(TrainerFailed):
            await waiting
        assert ours.trainer.silence is None

    run_virtually(run())


def test_ranks_that_do_not_start_in_time_are_named() -> None:
    place = Place()
    ours = ranks(place)
    place.answers = lambda name: (20_000,) if name == "free_ports" else "hangs"
    with pytest.raises((ServerFailed, TrainerFailed), match="30 s"):
        run_virtually(ours.restart(None))


def claim(root: Path) -> Claim:
    """The claim of a run."""
    return Claim(root=root, token=1, run="a", host="h", pid=1, since="now", machine=None, process=None)


def write_checkpoint(root: Path, step: int, mark: str) -> None:
    """Write what the driver reads of a checkpoint."""
    folder_of(root, step).mkdir()
    run = {"model": {}, "run": {"state": {"mark": mark}}}
    (folder_of(root, step) / "run.json").write_text(json.dumps(run))


class Quiet(RayTrainer):
    """A trainer that writes nothing itself."""

    async def begin_checkpoint(self, *_: Any) -> None:
        """Do nothing."""


def test_the_newest_checkpoint_is_the_last_of_this_run_that_is_complete(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        trainer = Quiet((), train_timeout_s=1.0, control_timeout_s=1.0)
        ours = RayCheckpointer(trainer, claim(tmp_path), with_optimizer=True, about={})
        found: list[Any] = [await ours.newest()]
        for step in (2, 4, 6):
            await ours.begin(step, {"mark": f"mark {step}"})
        write_checkpoint(tmp_path, 2, "mark 2")
        write_checkpoint(tmp_path, 4, "mark of another run")
        found.append(await ours.newest())
        write_checkpoint(tmp_path, 6, "mark 6")
        found.append(await ours.newest())
        (folder_of(tmp_path, 6) / "checksums.json").write_text("{")
        found.append(await ours.newest())
        return found

    none, second, sixth, torn = asyncio.run(run())
    assert none is None
    assert second == torn == (2, Origin(folder=folder_of(tmp_path, 2), kind="resume", optimizer=True))
    assert sixth[0] == 6


def test_a_restart_begins_with_the_first_weights_or_the_newest_checkpoint_and_tells_the_updater(tmp_path: Path) -> None:
    async def run() -> None:
        place, told = Place(), list[str]()
        ours = ranks(place, 1)
        first = Origin(folder=tmp_path / "first", kind="weights")
        checkpointer = RayCheckpointer(ours.trainer, claim(tmp_path), with_optimizer=True, about={})
        updater = cast(WeightUpdater, SimpleNamespace(trainer_restarted=told.append))
        processes = RankProcesses(ours, updater, checkpointer, origin=first, first_step=1)
        assert await processes.restart() == 1
        assert place.made[-1].calls == ["free_ports", "start", "load", "free_ports"]
        await checkpointer.begin(3, {"mark": "m"})
        write_checkpoint(tmp_path, 3, "m")
        assert await processes.restart() == 3
        assert told == ["127.0.0.1", "127.0.0.1"]
        assert await processes.find_lost() is None

    asyncio.run(run())
