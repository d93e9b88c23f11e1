"""The draws, the checks and the tables of a campaign of kills, on made-up lives."""

from array import array
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from asyncrl.buffer.batches import Dispatch
from asyncrl.buffer.journal import Admitted, Filtered, Finished, HeldGroup, Left, PromptPlace, Record, Snapshot, Taken
from asyncrl.types import FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Span, Weights
from benchmarks.chaos.accounts import BROKEN, TO_THE_END, Figures
from benchmarks.kills.__main__ import main, pooled
from benchmarks.kills.checks import Kept, Remains, kept, lengths_trained
from benchmarks.kills.drawn import KILLS_PER_LIFE, LAST_STEP, NUM_STEPS, VARIANTS, lives, unkilled
from benchmarks.kills.history import History, Keeper, read
from benchmarks.kills.judged import Outcome, digest_of_weights, judgement, samples
from benchmarks.kills.lengths import compared
from benchmarks.kills.played import Play
from benchmarks.kills.told import Told, compared_table, summary, table, totals
from tests.unit.buffer.journal.disks import write

# ---- made-up journals


def group(group_id: int, *answers: tuple[int, ...]) -> ScoredGroup:
    return ScoredGroup(
        group_id=GroupId(group_id),
        prompt=Prompt(row=group_id, epoch=0, text="", token_ids=(1,), label=None),
        dispatched=Weights(version=0, step=0),
        samples=tuple(scored(index, answer) for index, answer in enumerate(answers)),
    )


def scored(index: int, answer: tuple[int, ...]) -> ScoredSample:
    sample = Sample(
        index=index,
        token_ids=answer,
        logprobs=array("f", [-1.0]) * len(answer),
        spans=(Span(weights=Weights(version=0, step=0), start=0, stop=len(answer)),),
        text="",
        finish=FinishReason.STOP,
        seconds=1.0,
    )
    return ScoredSample(sample=sample, reward=1.0, loss_mask=(1,) * len(answer))


def admitted(group_id: int, row: int | None = None) -> Admitted:
    place = PromptPlace(epoch=0, row=group_id if row is None else row)
    return Admitted(group_id=GroupId(group_id), place=place, prompts_taken=group_id + 1, last_taken=(0, group_id))


def answers(group_id: int) -> tuple[tuple[int, ...], ...]:
    return (group_id,) * (1 + group_id % 3), (5, 6)


def finished(group_id: int, *other: tuple[int, ...], deadline: int = 9) -> Finished:
    dispatch = Dispatch(order=group_id, deadline=deadline, group_id=GroupId(group_id))
    return Finished(dispatch=dispatch, group=group(group_id, *(other or answers(group_id))))


def taken(step: int, *group_ids: int) -> Taken:
    return Taken(step=step, group_ids=tuple(map(GroupId, group_ids)))


def snapshot(step: int, *held: int) -> Snapshot:
    groups = [
        HeldGroup(group_id=GroupId(each), place=PromptPlace(epoch=0, row=each), is_buffered=True) for each in held
    ]
    return Snapshot(step=step, state={}, held=tuple(groups))


def stale(group_id: int, *, returns: bool = True) -> Left:
    return Left(group_id=GroupId(group_id), outcome="stale", num_tokens=3, returns_prompt=returns)


BEFORE: list[Record] = [
    snapshot(0),
    *(admitted(each) for each in range(6)),
    *(finished(each) for each in range(4)),
    taken(0, 0, 1),
]
"""Up to the kill: step 0 is taken, the groups 2 and 3 wait, and 4 and 5 are in flight."""
AFTER: list[Record] = [
    *(admitted(each) for each in (4, 5)),
    taken(1, 2, 3),
    *(finished(each) for each in (4, 5)),
    snapshot(2, 4, 5),
]
"""From the kill to the end: step 1 is trained, and the groups 4 and 5 are kept."""

FIRST = {group_id: answers(group_id) for group_id in (0, 1)}
"""The file of the first step."""


def remains(after: list[Record] = AFTER, **changes: Any) -> Remains:
    """The remains of a life of two steps, with its only kill after ``BEFORE``."""
    records = [((1, stop), record) for stop, record in enumerate([*BEFORE, *after], 1)]
    second = {group_id: answers(group_id) for group_id in (2, 3)}
    whole = Remains(
        num_steps=2,
        max_staleness=2,
        history=History.of(records),
        missing=(),
        marks=({1: len(BEFORE)},),
        files=({0: FIRST}, {0: FIRST, 1: second}),
        lags=(0, 2),
    )
    return replace(whole, **changes)


# ---- the checks


def test_a_life_that_kept_everything_has_no_violation() -> None:
    found = kept(remains())
    assert found == Kept(num_finished=4, num_in_flight=2, num_compared=4)
    assert found.violations() == []
    assert lengths_trained(remains()) == {0: [1, 2], 1: [2, 2], 2: [3, 2], 3: [1, 2]}


def without(*gone: Record) -> list[Record]:
    return [record for record in AFTER if record not in gone]


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ([*without(taken(1, 2, 3)), taken(1, 2, 4)], "1 finished groups lost"),
        ([finished(2, (9,), (9,)), *AFTER], "1 finished groups generated again"),
        (
            [stale(3), admitted(6, row=3), finished(6), *without(taken(1, 2, 3)), taken(1, 2, 6)],
            "before their deadline",
        ),
        ([*without(snapshot(2, 4, 5)), snapshot(2, 4)], "1 groups without an end in the journal"),
        ([taken(0, 1, 0), *AFTER], "1 batches taken again with other groups"),
        ([taken(0, 0, 2), *AFTER], "1 batches taken again with other groups"),
        ([admitted(6, row=2), finished(6), *without(taken(1, 2, 3)), taken(1, 2, 6)], "1 prompts settled twice"),
        ([*without(taken(1, 2, 3)), taken(1, 0, 3)], "1 prompts settled twice"),
    ],
)
def test_a_journal_that_lost_something_is_found(after: list[Record], why: str) -> None:
    assert why in "; ".join(kept(remains(after)).violations())


def test_a_group_that_was_dropped_is_not_lost() -> None:
    others = [admitted(6), finished(6), *without(taken(1, 2, 3)), taken(1, 2, 6)]
    dropped = Filtered(group_id=GroupId(3), reason="std", num_tokens=3, num_observed=0)
    files = ({0: FIRST}, {1: {2: answers(2), 6: answers(6)}})
    assert kept(remains([dropped, *others], files=files)).violations() == []
    late = [finished(3, deadline=0), stale(3), *others]
    assert kept(remains(late, files=files)).violations() == [], "no step could train it any more"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lags": (0, 3)}, ["1 lags above the bound"]),
        ({"missing": (1,)}, ["1 segments of the journal not seen"]),
        ({"files": ({}, {0: {0: answers(0), 1: ((9,), (9,))}})}, ["1 finished groups generated again"]),
        (
            {"files": ({0: {0: answers(0), 1: ((9,),)}}, {0: {0: answers(0), 1: answers(1)}})},
            ["1 steps with other tokens"],
        ),
        ({"files": ({}, {0: {1: answers(1), 0: answers(0)}})}, ["1 steps with other tokens"]),
    ],
)
def test_files_that_differ_from_the_journal_are_found(changes: dict[str, Any], why: list[str]) -> None:
    assert kept(remains(**changes)).violations() == why


def test_a_record_that_is_not_whole_at_the_kill_does_not_count() -> None:
    found = kept(remains(marks=({1: len(BEFORE) - 2},)))
    assert (found.num_finished, found.num_in_flight) == (3, 3)


def test_each_violation_and_other_weights_break_a_life() -> None:
    clean = kept(remains())
    assert judgement(TO_THE_END, clean, has_same_weights=True) == TO_THE_END
    assert judgement(TO_THE_END, clean, has_same_weights=None) == TO_THE_END
    other = judgement(TO_THE_END, clean, has_same_weights=False)
    assert other == f"{BROKEN}: other final weights than without kills"
    lost = judgement(f"{BROKEN}: hung", replace(clean, finished_lost=2), has_same_weights=None)
    assert lost == f"{BROKEN}: hung; 2 finished groups lost"


# ---- files


def test_a_run_with_its_last_checkpoint_is_not_killed(tmp_path: Path) -> None:
    play = Play(next(lives(7, "driver", VARIANTS)), tmp_path, lambda line: None)
    assert not play.is_complete
    for step, is_complete in ((NUM_STEPS - 4, False), (NUM_STEPS, True)):
        file = play.save / f"iter_{step:07d}" / "run.json"
        file.parent.mkdir(parents=True)
        file.write_bytes(orjson.dumps({"run": {"state": {"step": step}}}))
        assert play.is_complete is is_complete


def test_segments_stay_when_the_run_deletes_them(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    keeper = Keeper(journal, tmp_path / "segments")
    (journal / "segment-000001.journal").write_bytes(b"12345")
    assert keeper.mark() == {1: 5}
    with (journal / "segment-000001.journal").open("ab") as file:
        file.write(b"6")
    (journal / "segment-000001.journal").unlink()
    (journal / "segment-000002.journal").write_bytes(b"1")
    assert keeper.mark() == {1: 6, 2: 1}


def test_the_kept_segments_are_read_as_one_history(tmp_path: Path) -> None:
    write(tmp_path / "journal", BEFORE)
    keeper = Keeper(tmp_path / "journal", tmp_path / "segments")
    mark = keeper.mark()
    write(tmp_path / "journal", AFTER, run_epoch=2)
    keeper.look()
    history, missing = read(keeper.folder)
    assert missing == ()
    assert kept(remains(history=history, marks=(mark,))) == kept(remains())
    (keeper.folder / "segment-000001.journal").unlink()
    assert read(keeper.folder)[1] == (1,)


def test_the_samples_of_a_step_are_read_by_group(tmp_path: Path) -> None:
    rows = [{"step": 3, "group_id": 7 - each // 2, "tokens": [each], "lag": each % 2} for each in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "step-000003.parquet")
    assert samples(tmp_path) == {3: ({7: ((0,), (1,)), 6: ((2,), (3,))}, 1)}
    assert samples(tmp_path / "none") == {}


def test_weights_have_a_digest(tmp_path: Path) -> None:
    assert digest_of_weights(tmp_path) == ""
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = digest_of_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert first and digest_of_weights(tmp_path) not in ("", first)


# ---- lengths


def test_lengths_of_one_distribution_agree_and_missing_long_answers_are_found() -> None:
    draw = np.random.default_rng(1)
    started, trained = (draw.geometric(0.1, (400, 4)).clip(1, 64).tolist() for _ in range(2))
    same = compared(started, trained)
    short = compared(started, [[each for each in group if each < 20] for group in trained])
    assert same is not None and short is not None
    assert same.num_answers == (1600, 1600)
    assert same.p > 0.05 and short.p < 0.001
    identical = compared(started, started)
    assert identical is not None and (identical.distance, identical.p) == (0.0, 1.0)
    assert compared([], trained) is None


def test_a_group_of_several_lives_is_one_entry() -> None:
    def outcome(lengths: dict[str, list[int]], in_flight: list[int]) -> Outcome:
        return Outcome(weights="", steps={}, lengths=lengths, in_flight=in_flight, started=[0, 1, 2])

    whole = outcome({"0": [3, 4], "1": [5, 6], "3": [9, 9]}, [])
    both = [("v", "u", whole, outcome({"0": [3, 4], "1": [5, 7]}, [each])) for each in (0, 1)]
    assert pooled(both, only_in_flight=False) == ([[3, 4], [5, 6], []], [[3, 4, 3, 4], [5, 7, 5, 7], []])
    assert pooled(both, only_in_flight=True) == ([[3, 4], [5, 6]], [[3, 4], [5, 7]])


# ---- draws and tables


def test_a_campaign_is_repeatable_and_meets_every_variant_with_every_victim() -> None:
    drawn = list(islice(lives(3, None, VARIANTS), 32))
    assert drawn == list(islice(lives(3, None, VARIANTS), 32))
    assert Counter(life.victim for life in drawn) == {"driver": 16, "rank": 8, "engine": 8}
    assert len({(life.victim, life.variant.name) for life in drawn}) == 3 * len(VARIANTS)
    assert {life.num_engines for life in drawn if life.victim == "engine"} == {1, 2}
    kills = [kill for life in drawn for kill in life.kills]
    assert len(kills) == 32 * KILLS_PER_LIFE
    assert {kill.moment for kill in kills} == {"random", "start", "update", "commit"}
    assert all(1 <= kill.step <= LAST_STEP for kill in kills)
    assert {kill.process for kill in kills} == {"driver", "rank", "scheduler", "front"}
    assert {life.victim for life in islice(lives(3, "rank", VARIANTS), 5)} == {"rank"}
    assert unkilled(3, VARIANTS[0]).kills == ()


def told(life: int, **changes: Any) -> Told:
    figures = Figures(
        tokens_lost=30, prompts_lost=0, prompts_failed=0, prompts_twice=0, steps_changed=0, is_balanced=True
    )
    kills = ({"process": "driver", "moment": "random", "steps": 3, "at": 0.0, "next_step_s": 20.0},)
    values: dict[str, Any] = {"victim": "driver", "variant": "dense-s0", "num_engines": 1, "codes": (-9, 0)}
    values |= {"kills": kills, "seconds": 60.0, "figures": figures, "kept": kept(remains()), "weights": "a"}
    return Told(life=life, seed=0, **(values | {"verdict": TO_THE_END} | changes))


def test_the_tables_have_the_kills_of_each_victim_and_all() -> None:
    rows = [told(0).as_json(), told(1, has_same_weights=False, verdict=f"{BROKEN}: x", first_other_step=4).as_json()]
    first, second = table(rows)[2:]
    assert first.startswith("| 0 | driver | dense-s0 | 1 | driver (random, 3) | -9, 0 | 60 | 30 | 4 (4 compared) | 2 |")
    assert "| other, first other step 4 | BROKEN: x |" in second
    assert summary(rows)[2:] == [
        "| driver | all | 2 | 2 | 60 | 20.0 | 20.0 | 30 | 1 |",
        "| driver | dense-s0 | 2 | 2 | 60 | 20.0 | 20.0 | 30 | 1 |",
        "| all | all | 2 | 2 | 60 | 20.0 | 20.0 | 30 | 1 |",
    ]
    assert totals(rows) == "2 kills in 2 lives, 60 s each: 1 lives BROKEN; 8 finished groups were there at the kills"
    (line,) = compared_table([("all", "all", compared([[1, 1]], [[1, 1]])), ("all", "none", None)])[2:]
    assert line == "| all | all | 2 | 2 | 1.00 | 1.00 | 0.0000 | 1.000 |"


def test_a_campaign_with_enough_kills_plays_no_further_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lives.jsonl").write_bytes(orjson.dumps(told(0).as_json()) + b"\n")
    assert main(["--kills", "1", "--out", str(tmp_path)]) == 0
    assert "1 kills in 1 lives" in capsys.readouterr().out
    broken = told(1, verdict=f"{BROKEN}: hung").as_json()
    (tmp_path / "lives.jsonl").write_bytes(orjson.dumps(broken) + b"\n")
    assert main(["--kills", "1", "--out", str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        main(["--variant", "huge"])
