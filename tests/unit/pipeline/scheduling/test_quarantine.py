"""Rows that keep failing: counted over resumed runs, left out, and named in a file."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import orjson
import pytest

from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.errors import EngineLost, FailureBudgetSpent, RewardFailed, SampleFailed
from asyncrl.pipeline.scheduling import quarantine_file
from asyncrl.pipeline.scheduling.quarantine import FailedRow, Quarantine
from asyncrl.pipeline.scheduling.quarantine_file import QUARANTINE_FILE, QuarantineFile, open_quarantine, read_rows
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.rewards.values import reward_of
from asyncrl.types import Prompt, Sample, ScoredGroup
from tests.unit.pipeline.harness import World, token_sum

LIMIT = 3
CUT = r'"\ud83d"'


def prompt(row: int, token_ids: tuple[int, ...] = (1, 2), **metadata: Any) -> Prompt:
    return Prompt(row=row, epoch=0, text=f"question {row}", token_ids=token_ids, label="", metadata=metadata)


def bad(rows: range) -> Callable[[Prompt, Sample], Any]:
    """A reward that raises for some rows in every epoch."""

    async def reward(prompt: Prompt, sample: Sample) -> float:
        if prompt.row in rows:
            raise ValueError(f"row {prompt.row} has no label")
        return await token_sum(prompt, sample)

    return reward


def settled(world: World) -> int:
    """Prompts that have left, or wait to start again."""
    stats = world.scheduler.stats()
    counts = stats.groups
    held = counts.in_flight + counts.partial + counts.buffered + counts.training
    return counts.trained + counts.filtered + counts.failed + counts.quarantined + held + stats.returned


def test_prompts_of_a_source_are_known_by_their_content(tmp_path: Path) -> None:
    quarantine, file = open_quarantine(2, tmp_path, None, by_content=True)
    assert not quarantine.failed(prompt(4), RewardFailed("no label"))
    assert not quarantine.withholds(prompt(9))
    assert not quarantine.failed(prompt(5, (7,)), RewardFailed("no label"))
    assert quarantine.failed(prompt(9), RewardFailed("no label"))
    assert quarantine.leaves_out(prompt(12))
    assert quarantine.withholds(prompt(12))
    assert not quarantine.leaves_out(replace(prompt(12), label="another"))
    quarantine.succeeded(prompt(13, (7,)))
    asyncio.run(file.flush())
    again, _ = open_quarantine(2, tmp_path, None, by_content=True)
    assert again.leaves_out(prompt(20))
    assert not again.failed(prompt(21, (7,)), RewardFailed("no label"))
    by_row, _ = open_quarantine(2, tmp_path, None)
    assert not by_row.withholds(prompt(4))


def test_a_prompt_in_quarantine_goes_back_to_no_source() -> None:
    """A source that gives failed prompts again would give it for ever."""
    back = list[int]()

    class Source:
        def finished(self, group: ScoredGroup, reason: str | None, /) -> None:
            pass

        def returned(self, prompt: Prompt, group: ScoredGroup | None, outcome: str, /) -> bool:
            back.append(prompt.row)
            return False

    world = World(
        steps=12,
        groups_per_step=4,
        rows=10,
        reward=bad(range(4, 5)),
        quarantine=Quarantine(2, by_content=True),
        observers=(Source(),),
    )
    world.run()
    assert back == [4]
    assert world.scheduler.stats().groups.quarantined > 0


def test_a_resumed_run_gets_past_rows_that_always_fail() -> None:
    """Four bad rows side by side end a run that allows two.  Its resumed run must not end at the same place."""
    before, ends, rows = None, list[int](), dict[int, FailedRow]()
    for _ in range(5):
        checkpoints = FakeCheckpoints(0.1)
        world = World(
            steps=20,
            groups_per_step=4,
            rows=60,
            save_interval=2,
            checkpoints=checkpoints,
            before=before,
            reward=bad(range(20, 24)),
            quarantine=Quarantine(LIMIT, rows.values(), lambda row: rows.update({row.row: row})),
        )
        try:
            world.run()
            break
        except FailureBudgetSpent:
            ends.append(len(world.trainer.batches))
            found = checkpoints.found(1e9)
            before = RunState.from_json(orjson.loads(orjson.dumps(found)))
    assert len(ends) == 1, "the second life reaches the last step"
    assert world.prompts.taken == settled(world)
    assert sorted(rows) == [20, 21, 22, 23]
    assert all("has no label" in row.reason for row in rows.values())


def test_a_failure_that_quotes_half_a_surrogate_pair_costs_its_group_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer in JSON that is cut within an emoji has one, and no file in UTF-8 can hold it."""
    caplog.set_level(logging.CRITICAL, "asyncrl")  # pytest's workers cannot send such a log

    async def reward(prompt: Prompt, sample: Sample) -> float:
        if prompt.row == 4:
            raise ValueError(f"no tool is named {json.loads(CUT)}")
        return await token_sum(prompt, sample)

    quarantine, file = open_quarantine(2, tmp_path, None)
    world = World(steps=6, groups_per_step=4, rows=10, reward=reward, quarantine=quarantine).run()
    assert len(world.trainer.batches) == 6
    asyncio.run(file.flush())
    (row,) = read_rows([tmp_path / QUARANTINE_FILE])
    assert row.row == 4
    assert "no tool is named \\ud83d" in row.reason


def test_rows_are_left_out_in_later_epochs_and_counted() -> None:
    world = World(
        steps=30, groups_per_step=4, rows=10, reward=bad(range(4, 5)), quarantine=Quarantine(2), max_failed_groups=2
    ).run()
    assert len(world.trainer.batches) == 30
    counts = world.scheduler.gauges().groups
    assert counts.failed == 2
    assert counts.quarantined >= 9
    assert world.prompts.taken == settled(world)
    assert not any(group.prompt.row == 4 for batch in world.trainer.batches for group in batch.groups)


def test_the_count_of_left_out_prompts_is_part_of_the_checkpoint() -> None:
    checkpoints = FakeCheckpoints()
    plan: dict[str, Any] = {"groups_per_step": 4, "rows": 5, "reward": bad(range(4, 5))}
    World(steps=12, checkpoints=checkpoints, quarantine=Quarantine(1), **plan).run()
    before = RunState.from_json(orjson.loads(orjson.dumps(checkpoints.written[12])))
    assert before.groups.quarantined > 0
    resumed = World(steps=20, before=before, quarantine=Quarantine(1), **plan).run()
    assert resumed.scheduler.gauges().groups.quarantined > before.groups.quarantined
    assert resumed.prompts.taken == settled(resumed)


def test_a_checkpoint_of_an_earlier_version_has_no_such_count() -> None:
    checkpoints = FakeCheckpoints()
    World(steps=2, checkpoints=checkpoints).run()
    found = checkpoints.written[2]
    del found["groups"]["quarantined"]
    assert RunState.from_json(orjson.loads(orjson.dumps(found))).groups.quarantined == 0


def test_a_reward_without_its_key_blames_no_row() -> None:
    async def sometimes(prompt: Prompt, sample: Sample) -> Any:
        return reward_of({"right": 1.0} if prompt.row % 8 == 3 else 1.0, None)

    async def never(prompt: Prompt, sample: Sample) -> Any:
        return reward_of({"right": 1.0}, None)

    rows = list[FailedRow]()
    World(steps=8, reward=sometimes, quarantine=Quarantine(1, (), rows.append)).run()
    world = World(reward=never, quarantine=Quarantine(1, (), rows.append))
    with pytest.raises(FailureBudgetSpent, match="a dict reward with right: name one of them with --reward-key"):
        world.run()
    assert not rows


def test_a_run_without_a_good_row_ends() -> None:
    world = World(rows=3, reward=bad(range(3)), quarantine=Quarantine(2), max_failed_groups=50)
    with pytest.raises(FailureBudgetSpent, match=r"all rows are in quarantine .*row . has no label"):
        world.run()


def test_without_a_limit_every_failure_counts() -> None:
    world = World(rows=1, reward=bad(range(1)), max_failed_groups=5)
    with pytest.raises(FailureBudgetSpent, match="5 groups failed in a row"):
        world.run()


def test_a_success_clears_a_row_and_other_content_is_another_row() -> None:
    written: list[FailedRow] = []
    kept = Quarantine(2, write=written.append)
    error = RewardFailed("no label\n" + 1000 * "x")
    assert not kept.failed(prompt(7, id="seven"), error)
    assert kept.failed(prompt(7, id="seven"), error)
    assert kept.leaves_out(prompt(7))
    assert not kept.leaves_out(prompt(7, token_ids=(3,)))
    assert not kept.leaves_out(prompt(8))
    last = written[-1]
    assert (last.row, last.id, last.attempts, last.is_quarantined) == (7, "seven", 2, True)
    assert (last.text, last.reason) == ("question 7", str(error)[:300])
    kept.failed(prompt(8), error)
    kept.succeeded(prompt(8))
    kept.succeeded(prompt(9))
    assert written[-1].attempts == 0
    assert len(written) == 4
    assert not kept.failed(prompt(8), error), "it counts anew"


def test_failures_of_engines_are_not_those_of_rows() -> None:
    kept = Quarantine(1)
    assert not kept.failed(prompt(1), SampleFailed("3 attempts"))
    assert not kept.leaves_out(prompt(1))
    world = World(failures={"g1.0": EngineLost("gone")}, retries=0, quarantine=kept).run()
    assert world.scheduler.gauges().groups.quarantined == 0


async def written(file: QuarantineFile, changes: Callable[[], object]) -> None:
    """Make changes while the file is written, as a run does, until the run is cancelled."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(file.run())
        await asyncio.sleep(0)
        changes()
        await asyncio.sleep(0)
        running.cancel()


def test_the_file_keeps_the_last_line_of_a_row_and_survives_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / QUARANTINE_FILE
    kept, file = open_quarantine(2, tmp_path, None)

    def changes() -> None:
        for row in (1, 1, 2, 3):
            kept.failed(prompt(row), RewardFailed("no label"))
        kept.succeeded(prompt(3))

    asyncio.run(written(file, changes))
    with path.open("ab") as torn:
        torn.write(b'{"row": 4, "dig')
    kept, file = open_quarantine(2, tmp_path, None)
    asyncio.run(written(file, lambda: kept.failed(prompt(5), RewardFailed("no label"))))
    rows = {row.row: row for row in read_rows([path])}
    assert {row: each.attempts for row, each in rows.items()} == {1: 2, 2: 1, 3: 0, 5: 1}
    again, _ = open_quarantine(2, tmp_path / "other", tmp_path)
    assert again.num_left_out == 1
    assert again.leaves_out(prompt(1))
    assert not again.leaves_out(prompt(2))
    lowered, _ = open_quarantine(1, tmp_path, None)
    assert lowered.num_left_out == 1, "a limit holds for failures from now on"


def test_a_disk_that_does_not_answer_does_not_keep_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Event()
    monkeypatch.setattr(quarantine_file, "LAST_FLUSH_S", 0.2)
    monkeypatch.setattr(quarantine_file, "_append", lambda path, lines: answers.wait(20.0))

    async def ended() -> None:
        async with asyncio.TaskGroup() as tasks:
            file = QuarantineFile(tmp_path / QUARANTINE_FILE)
            running = tasks.create_task(file.run())
            file.write(FailedRow(row=1, digest="1"))
            await asyncio.sleep(0.05)
            running.cancel()

    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        asyncio.run(ended())
    answers.set()
    assert time.monotonic() - began < 10.0
    assert "rows that failed last were not written within 0.2 s" in caplog.text


def test_a_file_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "away" / QUARANTINE_FILE
    file = QuarantineFile(path)
    kept = Quarantine(2, write=file.write)

    async def main() -> None:
        for _ in range(2):
            kept.failed(prompt(1), RewardFailed("no label"))
            await file.flush()

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records if "no longer written" in record.getMessage()] == [
        f"{path}: rows that fail are no longer written: [Errno 2] No such file or directory: '{path}'"
    ]
    assert kept.leaves_out(prompt(1))
