"""Experts go to their part alone if, and only if, every engine holds them as planned."""

import asyncio
from dataclasses import replace

import pytest

from asyncrl.engines.weight_sync.broadcast import WeightReceiver
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.expert_parts import (
    EngineParts,
    asked_parts,
    name_of_parts,
    num_parts_of,
    obstacle,
    part_of_expert,
    worst_of,
)
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import WeightUpdateFailed
from asyncrl.types import RankBytes, Weights
from tests.steps import failing
from tests.unit.engines.weight_sync.test_broadcast import Engine, Trainer, publish, updater_of

BUCKETS = tuple(
    WeightBucket(names=(name,), dtypes=("float32",), shapes=((2,),), num_bytes=8, expert_part=part)
    for name, part in (("dense", None), ("experts.0", 0), ("experts.1", 1))
)


def parts(*needed_by: set[int], num_parts: int = 2, received: int = 16, needed: int = 16) -> EngineParts:
    return EngineParts(
        num_parts=num_parts,
        needed_by=tuple(map(frozenset, needed_by)),
        bytes_per_rank=(RankBytes(received=16, needed=16), RankBytes(received=received, needed=needed)),
    )


AS_PLANNED = parts({0}, {1})
"""The report on two buckets of a part each."""


def engine(url: str = "a", report: EngineParts | None = AS_PLANNED, **about: object) -> Engine:
    return Engine(url, 2, records=True, parts=report, **about)  # type: ignore[arg-type]


def test_parts_are_equal_ranges_of_experts() -> None:
    assert [part_of_expert(expert, 8, 2) for expert in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (num_parts_of(BUCKETS), num_parts_of(BUCKETS[:1])) == (2, 1)


def test_the_name_of_the_groups_has_the_number_of_parts() -> None:
    assert asked_parts(name_of_parts("asyncrl-3", 8)) == ("asyncrl-3", 8)
    assert asked_parts("asyncrl-3") is None


def test_a_plan_that_every_engine_follows_has_no_obstacle() -> None:
    report = parts({0, 1}, {0}, {1})
    assert obstacle(BUCKETS, {"a": 2, "b": 2}, {"a": report, "b": report}) is None
    assert obstacle(BUCKETS, {"a": 2}, {"a": parts({0}, {0}, set())}) is None  # a rank that holds less


@pytest.mark.parametrize(
    ("report", "num_ranks", "said"),
    [
        (None, 2, "does not report which experts its ranks hold"),
        (parts({0}, {0}, {1}, num_parts=4), 4, "has an expert-parallel size of 4, the SGLang flags of the run 2"),
        (parts({0}, {0}, {1}), 3, "has 3 ranks, which are not 2 parts as large as those of other engines"),
        (
            parts({0}, {0}, {0, 1}),
            2,
            "holds weights of the bucket of experts.1 in part 0, expected in part 1 alone",
        ),
    ],
)
def test_an_obstacle_names_the_engine_and_the_reason(report: EngineParts | None, num_ranks: int, said: str) -> None:
    assert obstacle(BUCKETS, {"a": num_ranks}, {"a": report}) == f"a {said}"


def test_the_third_update_and_all_later_ones_go_by_part() -> None:
    a, b, trainer = engine("a"), engine("b"), Trainer(parts=(0, 1))
    publish(a, b, trainer=trainer, times=4, is_checked=True)
    groups = "asyncrl-0/2-expert-parts"
    assert trainer.told == [
        "join",
        *("snapshot", "send"),
        *("snapshot checked", "send checked"),
        f"{groups}: 2 groups of 3",
        *("snapshot by part checked", "send by part checked") * 2,
    ]
    assert [told for told in a.told if "one" in told or "of" in told] == [
        "rank 1 of 5",
        "one None",
        "one and two 4 checked",
        f"{groups}: from 1 of 3",
        "one and two 5 by part checked",
        "one and two 6 by part checked",
    ]
    assert f"{groups}: from 2 of 3" in b.told


def test_an_engine_that_holds_experts_elsewhere_keeps_all_updates_whole_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = Trainer(parts=(0, 1))
    publish(engine("a"), engine("b", parts({0, 1}, {1})), trainer=trainer, times=4)
    assert not [told for told in trainer.told if "part" in told]
    (warning,) = caplog.records
    assert warning.getMessage() == (
        "weight updates send all experts to every engine rank: b holds weights of the bucket of one in part 1, "
        "expected in part 0 alone"
    )


def test_buckets_without_parts_are_never_sent_by_part(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    publish(engine(report=None), trainer=trainer, times=4)
    assert not [told for told in trainer.told if "part" in told]
    assert not caplog.records


def test_engines_with_parts_that_the_flags_do_not_name_give_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    publish(engine("a"), trainer=trainer, times=4)
    assert not [told for told in trainer.told if "part" in told]
    (warning,) = caplog.records
    assert "has an expert-parallel size of 2, the SGLang flags of the run 1" in warning.getMessage()


def test_a_new_group_begins_with_whole_updates_again() -> None:
    a, b, trainer = engine("a"), engine("b"), Trainer(parts=(0, 1))
    membership: EngineMembership[WeightReceiver] = EngineMembership((a, b))

    async def run() -> None:
        updater = updater_of(membership, trainer)
        await updater.connect()
        for version in range(6):
            if version == 3:
                membership.mark_lost("b")
            await updater.snapshot()
            await updater.publish(Weights(version=version, step=version))

    asyncio.run(run())
    sent = [told for told in trainer.told if told.startswith("send")]
    assert sent == ["send", "send", "send by part", "send", "send", "send by part"]
    assert trainer.told[-3] == "asyncrl-1/2-expert-parts: 2 groups of 2"


def test_an_engine_that_cannot_join_its_part_is_named() -> None:
    cannot = failing("asyncrl-0/2-expert-parts: from 1 of 2", WeightUpdateFailed("another size"))
    with pytest.raises(WeightUpdateFailed, match="forming the groups of expert parts: a: another size"):
        publish(engine("a", step=cannot), trainer=Trainer(parts=(0, 1)), times=3)


def test_the_report_has_the_rank_that_received_the_most_in_relation_to_its_needs() -> None:
    report = parts({0}, {1}, received=24, needed=16)
    told = publish(engine("a", report), engine("b"), trainer=Trainer(parts=(0, 1)), times=2)
    assert told.rank_bytes == RankBytes(received=24, needed=16)
    assert publish(engine("a"), trainer=Trainer(parts=(0, 1))).rank_bytes is None  # the first update
    assert worst_of([None]) is None
    assert worst_of([replace(report, bytes_per_rank=(RankBytes(received=8, needed=0),))]) == RankBytes(
        received=8, needed=0
    )
