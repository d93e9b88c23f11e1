"""Updates from the real trainer to an engine of two ranks with expert parallelism, received by the plug-in."""

import json
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.engines.megatron.rank import MegatronRank
from asyncrl.engines.sglang.labels import (
    DIRECT,
    DIRECT_BY_PART,
    DIRECT_BY_PART_CHECKED,
    EXPERT_PARTS,
    NOT_REPLAYED,
)
from asyncrl.engines.sglang.plugin import direct, expert_parts
from asyncrl.engines.sglang.plugin.expert_parts import ExpertPart
from asyncrl.engines.weight_sync.expert_parts import name_of_parts
from asyncrl.errors import WeightUpdateFailed
from tests.engines.megatron.tiny import free_port, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.sglang.plugin import parts_process
from tests.engines.sglang.plugin.parts_process import NUM_EXPERTS, NUM_PARTS
from tests.engines.sglang.plugin.test_replay_check import Engine as RankWithoutNetwork
from tests.engines.sglang.plugin.test_replay_check import Model, in_a_thread
from tests.forks import Fork

DEADLINE_S = 180
GROUPS = name_of_parts("weights", NUM_PARTS)

pytestmark = pytest.mark.timeout(900)


class Engine:
    """The engine's two ranks, each a process that gets the same requests."""

    def __init__(self, engine_port: int, group_port: int) -> None:
        self.ranks = [
            Fork(parts_process.__name__, rank, engine_port, group_port, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for rank in range(NUM_PARTS)
        ]

    def ask(self, load_format: str, names: Sequence[str], target: Path | str = "", **about: object) -> None:
        asked = {"dtypes": [], "shapes": [], **about, "load_format": load_format, "names": names, "target": str(target)}
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(asked) + "\n")
            rank.stdin.flush()

    def answers(self) -> list[Any]:
        """Whether the update worked, and the message, for each rank."""
        return [json.loads(rank.stdout.readline()) for rank in self.ranks if rank.stdout is not None]


Both = tuple[MegatronRank, Engine, list[str], list[list[int]]]
"""A trainer, an engine that has had its first update, and the first name and the part of each bucket."""


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    checkpoint = write_checkpoint(tmp_path / "hf", moe=True, num_experts=NUM_EXPERTS)
    port = free_port()
    engine = Engine(free_port(), port)
    settings = trainer_settings(
        checkpoint, update_weight_buffer_size=20_000, timeout_s=DEADLINE_S, num_expert_parts=NUM_PARTS
    )
    try:
        with one_rank(settings) as rank:
            rank.join_engines("127.0.0.1", port, 1 + NUM_PARTS, "weights", "gloo")
            assert rank.snapshot(is_checked=False)
            for bucket in rank.weight_buckets():
                about = asdict(bucket)
                engine.ask("flattened_bucket", **{key: about[key] for key in ("names", "dtypes", "shapes")})
                assert all(worked for worked, _ in engine.answers())
            names = [bucket.names[0] for bucket in rank.weight_buckets()]
            parts = [[] if each.expert_part is None else [each.expert_part] for each in rank.weight_buckets()]
            yield rank, engine, names, parts
    finally:
        for process in engine.ranks:
            process.kill()
            process.communicate()


def joined(both: Both) -> Both:
    """Send the second update, which is tested, and form the groups of the parts."""
    rank, engine, names, _ = both
    assert rank.snapshot(is_checked=False)
    engine.ask(DIRECT, names)
    assert all(worked for worked, _ in engine.answers())
    engine.ask("join", [GROUPS])
    rank.join_parts(NUM_PARTS, 2, GROUPS, "gloo")
    assert engine.answers() == [[True, "joined"]] * NUM_PARTS
    return both


def told_parts(message: str) -> Any:
    return json.loads(message.partition(EXPERT_PARTS)[2])


def received(folder: Path, number: int) -> bool:
    """Whether the rank has the saved bytes of all weights but the experts of other parts."""
    saved, found = load_file(folder / "model.safetensors"), load_file(f"{folder}-received-{number}")
    held = {name for name in saved if _part(name) in (None, number)}
    assert found.keys() == held
    return all(torch.equal(saved[name], found[name]) for name in held)


def _part(name: str) -> int | None:
    found = re.search(r"experts\.(\d+)\.", name)
    return None if found is None else int(found[1]) * NUM_PARTS // NUM_EXPERTS


def test_ranks_report_the_buckets_that_they_need_and_receive_them_alone(both: Both, tmp_path: Path) -> None:
    rank, engine, names, parts = both
    buckets = rank.weight_buckets()
    whole = sum(each.num_bytes for each in buckets)
    needed = sum(each.num_bytes for each in buckets if each.expert_part != 1)
    assert rank.snapshot(is_checked=False)
    engine.ask(DIRECT, names)
    for worked, message in engine.answers():
        assert worked
        assert told_parts(message) == {
            "num_parts": NUM_PARTS,
            "needs": [3 if not part else 1 << part[0] for part in parts],
            "bytes": [[whole, needed]] * NUM_PARTS,
        }
    joined(both)
    for step, load_format in enumerate((DIRECT_BY_PART, DIRECT_BY_PART_CHECKED, DIRECT_BY_PART)):
        rank.train(random_batch(step=step))
        rank.save(tmp_path / f"saved-{step}")
        assert rank.snapshot(is_checked=load_format == DIRECT_BY_PART_CHECKED, by_part=True)
        engine.ask(load_format, names, shapes=parts, target=tmp_path / f"saved-{step}-received")
        for worked, message in engine.answers():
            assert worked, message
            assert told_parts(message)["bytes"] == [[needed, needed]] * NUM_PARTS
        assert all(received(tmp_path / f"saved-{step}", number) for number in range(NUM_PARTS))


def test_a_trainer_without_a_snapshot_sends_by_part_too(both: Both, tmp_path: Path) -> None:
    rank, engine, names, parts = joined(both)
    rank.train(random_batch())
    rank.save(tmp_path / "saved")
    rank._weight_sender.finish()  # noqa: SLF001
    engine.ask(DIRECT_BY_PART_CHECKED, names, shapes=parts, target=tmp_path / "saved-received")
    rank.send(is_checked=True, by_part=True)
    assert all(worked for worked, _ in engine.answers())
    assert all(received(tmp_path / "saved", number) for number in range(NUM_PARTS))


def test_a_rank_refuses_an_update_that_sends_its_experts_to_others(both: Both) -> None:
    rank, engine, names, parts = joined(both)
    engine.ask(DIRECT_BY_PART, names, shapes=[[0] if part else [] for part in parts])
    rank.abandon("weights")
    answers = engine.answers()
    assert not any(worked for worked, _ in answers)
    assert "this rank holds weights of the bucket of" in answers[1][1]


def test_ranks_that_wait_in_the_groups_of_their_parts_give_up_with_the_trainer(both: Both) -> None:
    rank, engine, names, parts = joined(both)
    experts_first = sorted(zip(names, parts, strict=True), key=lambda bucket: not bucket[1])
    names, parts = [name for name, _ in experts_first], [part for _, part in experts_first]
    engine.ask(DIRECT_BY_PART, names, shapes=parts)
    began = time.monotonic()
    rank.abandon("weights")
    for worked, message in engine.answers():
        assert not worked
        assert "the trainer has given this update up" in message or "another rank" in message
    assert time.monotonic() - began < 10.0


def test_an_engine_with_another_number_of_parts_is_refused(both: Both) -> None:
    _, engine, _, _ = both
    engine.ask("join", [name_of_parts("weights", 4)])
    for worked, message in engine.answers():
        assert not worked
        assert "this engine has 2 expert parts, the update group weights/4-expert-parts asks for others" in message


def test_groups_without_engines_are_given_up_within_the_deadline(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, *_ = both
    monkeypatch.setattr("asyncrl.engines.weight_sync.part_groups.JOIN_S", 1.0)
    began = time.monotonic()
    with pytest.raises(WeightUpdateFailed, match=f"cannot form the groups {GROUPS} of 2 ranks"):
        rank.join_parts(NUM_PARTS, 2, GROUPS, "gloo")
    assert time.monotonic() - began < 20.0


class SkippingModel(Model):
    """A model of a rank that holds nothing of ``c``, or whose loader copies it in another thread."""

    def __init__(self, *, in_thread: bool) -> None:
        super().__init__()
        self._in_thread = in_thread

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name != "c":
                super().load_weights([(name, tensor)])
            elif self._in_thread:
                in_a_thread(self.weights[name], tensor)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_bucket_counts_as_not_needed_only_if_loading_it_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, in_thread: bool
) -> None:
    """A loader's copies in other threads are not seen while it is watched."""
    for module in (direct, expert_parts):
        monkeypatch.setattr(module, "part_of_this_rank", lambda: ExpertPart(number=1, num_parts=2))
    engine = RankWithoutNetwork(monkeypatch, SkippingModel(in_thread=in_thread))
    said = engine.receive(DIRECT, ["a", "c"], value=2.0)
    assert told_parts(said)["needs"] == ([2, 2] if in_thread else [2, 0])
    assert (NOT_REPLAYED in said) == in_thread
    assert engine.values()["c"] == ([2.0] if in_thread else [0.0])
    num_loaded = engine.model.num_loaded
    engine.receive(DIRECT, ["a", "c"], value=3.0)
    assert engine.model.num_loaded == num_loaded  # replayed, and not needed
