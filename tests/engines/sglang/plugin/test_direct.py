"""Updates from the real trainer, received by the plug-in that copies the bytes that SGLang's loaders would copy."""

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.engines.megatron.rank import MegatronRank
from asyncrl.engines.megatron.weights import weight_sender
from asyncrl.engines.megatron.weights.weight_sender import _wait_for
from asyncrl.engines.sglang.labels import DIRECT, DIRECT_CHECKED, RECORDED
from asyncrl.engines.sglang.plugin import direct
from asyncrl.engines.sglang.plugin.arrival import Channel
from asyncrl.engines.sglang.plugin.copies import RecordedBucket
from asyncrl.engines.sglang.plugin.direct import DirectUpdates
from asyncrl.engines.weight_sync import group_abort
from asyncrl.engines.weight_sync.flat import checksum, views
from asyncrl.engines.weight_sync.group_abort import UpdateGroups, abandon
from asyncrl.errors import TrainerOutOfMemory, WeightUpdateFailed
from tests.engines.megatron.tiny import free_port, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.megatron.weights.fp8_checkpoints import in_fp8
from tests.engines.sglang.plugin import direct_process
from tests.forks import Fork

DEADLINE_S = 180
CHANNEL = Channel(group=None, main=None)
"""A channel of hooks without a network."""

pytestmark = pytest.mark.timeout(540)


class Engine:
    """The engine in another process."""

    def __init__(self, port: int) -> None:
        self.process = Fork(direct_process.__name__, port, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(
        self,
        load_format: str,
        names: Sequence[str],
        dtypes: Sequence[str] = (),
        shapes: Sequence[Sequence[int]] = (),
        target: Path | str = "",
    ) -> None:
        asked = {"load_format": load_format, "names": names, "dtypes": dtypes, "shapes": shapes}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**asked, "target": str(target)}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Whether the update worked, the message, and how many tensors went through the model's loaders."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


Both = tuple[MegatronRank, Engine, list[str]]
"""A trainer, an engine that has had its first update, and the first name in each bucket."""


@pytest.fixture(params=["in full", "fp8"])
def both(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Both]:
    """A trainer and an engine that has had its first update."""
    checkpoint = write_checkpoint(tmp_path / "hf", moe=True)
    if request.param == "fp8":
        in_fp8(checkpoint)
    port = free_port()
    engine = Engine(port)
    try:
        settings = trainer_settings(checkpoint, update_weight_buffer_size=20_000, timeout_s=DEADLINE_S)
        with one_rank(settings) as rank:
            rank.join_engines("127.0.0.1", port, 2, "weights", "gloo")
            assert rank.snapshot(is_checked=False)
            for bucket in rank.weight_buckets():
                engine.ask("flattened_bucket", **{key: asdict(bucket)[key] for key in ("names", "dtypes", "shapes")})
                assert engine.answer() == [True, RECORDED, len(bucket.names)]
            yield rank, engine, [bucket.names[0] for bucket in rank.weight_buckets()]
    finally:
        engine.process.kill()
        engine.process.communicate()


def engines_of(rank: MegatronRank) -> UpdateGroups:
    """The groups that the trainer and its engines share."""
    groups = rank._update_groups  # noqa: SLF001
    assert groups is not None
    return groups


def same(folder: Path, file: Path) -> bool:
    saved, received = load_file(folder / "model.safetensors"), load_file(file)
    assert saved.keys() == received.keys()
    return all(torch.equal(saved[name].view(torch.uint8), received[name].view(torch.uint8)) for name in saved)


def test_later_updates_are_copies_of_the_snapshot(both: Both, tmp_path: Path) -> None:
    """The first update and every checked one load twice the tensors that they copy: with changed bytes, and again."""
    rank, engine, names = both
    for step, (load_format, times) in enumerate(((DIRECT, 2), (DIRECT, 0), (DIRECT_CHECKED, 2))):
        rank.train(random_batch(step=step))
        rank.write_weights(tmp_path / "taken")
        assert rank.snapshot(is_checked=load_format == DIRECT_CHECKED)
        rank.train(random_batch(step=step, seed=9))  # trains before any engine has received
        engine.ask(load_format, names, target=tmp_path / "received")
        worked, said, num_loaded = engine.answer()
        assert (worked, said) == (True, RECORDED)
        assert same(tmp_path / "taken", tmp_path / "received")
        with_norms = {bucket.names[0]: bucket for bucket in rank.weight_buckets() if "norm" in " ".join(bucket.names)}
        num_cast = sum(len(bucket.names) for bucket in with_norms.values())
        num_tensors = sum(len(bucket.names) for bucket in rank.weight_buckets())
        assert num_loaded == num_cast + times * (num_tensors - num_cast)
        assert len(with_norms) < len(names)


def test_another_thread_resends_the_snapshot_while_the_trainer_trains(both: Both, tmp_path: Path) -> None:
    rank, engine, names = both
    rank.train(random_batch())
    rank.write_weights(tmp_path / "taken")
    assert rank.snapshot(is_checked=False)
    engine.ask(DIRECT, names, target=tmp_path / "first")
    assert engine.answer()[:2] == [True, RECORDED]
    may_end = Event()

    def train() -> None:
        for step in count(1):
            rank.train(random_batch(step=step, seed=9))
            if may_end.is_set():
                return

    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(train)
        try:
            assert rank.resend(is_checked=True)
            engine.ask(DIRECT_CHECKED, names, target=tmp_path / "again")
            assert engine.answer()[:2] == [True, RECORDED]
        finally:
            may_end.set()
        training.result()
    assert same(tmp_path / "taken", tmp_path / "first")
    assert same(tmp_path / "taken", tmp_path / "again")


def test_weights_that_were_moved_are_loaded_again(both: Both, tmp_path: Path) -> None:
    rank, engine, names = both
    engine.ask("move", [])
    rank.train(random_batch())
    rank.write_weights(tmp_path / "taken")
    assert rank.snapshot(is_checked=False)
    engine.ask(DIRECT, names, target=tmp_path / "received")
    worked, _, num_loaded = engine.answer()
    assert worked
    assert num_loaded == sum(len(bucket.names) for bucket in rank.weight_buckets())
    assert same(tmp_path / "taken", tmp_path / "received")


def test_a_trainer_without_room_for_copies_sends_while_it_waits(both: Both, tmp_path: Path) -> None:
    rank, engine, names = both
    rank._weight_sender._is_copied = False  # noqa: SLF001
    assert len(names) > 3  # there are two buffers
    for step in range(2):
        rank.train(random_batch(step=step))
        rank.write_weights(tmp_path / "sent")
        assert not rank.snapshot(is_checked=True)
        assert not rank.resend(is_checked=True)  # the buffers hold a part of the weights
        engine.ask(DIRECT_CHECKED, names, target=tmp_path / "received")
        rank.send(is_checked=True)
        assert engine.answer()[:2] == [True, RECORDED]
        assert same(tmp_path / "sent", tmp_path / "received")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("an engine died"), WeightUpdateFailed),
        (torch.OutOfMemoryError("an engine died"), TrainerOutOfMemory),
    ],
)
def test_a_failed_update_still_gathers_every_bucket(
    both: Both, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    """Other ranks send their parts of all buckets; parts that rank 0 did not gather would reach the next update."""
    rank, _, names = both
    gathered, each = [], weight_sender._Copies.snapshot  # noqa: SLF001

    def counted(copies: weight_sender._Copies, model: torch.nn.Module) -> Iterator[torch.Tensor]:
        for flat in each(copies, model):
            gathered.append(flat)
            yield flat

    def fails(flats: Iterator[torch.Tensor], group: object, **_: object) -> None:
        next(flats)
        raise error

    monkeypatch.setattr(weight_sender._Copies, "snapshot", counted)  # noqa: SLF001
    monkeypatch.setattr(weight_sender, "_broadcast", fails)
    rank._weight_sender._is_copied = False  # noqa: SLF001
    assert not rank.snapshot(is_checked=False)
    with pytest.raises(kind, match="an engine died"):
        rank.send(is_checked=False)
    assert len(gathered) == len(names)


def test_one_bucket_needs_one_buffer(tmp_path: Path) -> None:
    with one_rank(trainer_settings(write_checkpoint(tmp_path / "hf"))) as rank:
        (bucket,) = rank.weight_buckets()
        (flat,) = rank._weight_sender._new_copies(2).snapshot(rank._model)  # noqa: SLF001
    assert flat.numel() == bucket.num_bytes


def test_a_wrong_checksum_is_an_error_that_names_the_bucket(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, engine, names = both
    answers = []
    monkeypatch.setattr("asyncrl.engines.megatron.weights.weight_sender.checksum", lambda flat: checksum(flat) + 1)

    def end_with_the_answer() -> None:
        answers.append(engine.answer())
        engine.process.kill()

    engine.ask(DIRECT_CHECKED, names)
    reader = Thread(target=end_with_the_answer)
    reader.start()
    with pytest.raises(WeightUpdateFailed, match="not delivered"):
        rank.send(is_checked=True)
    reader.join()
    ((worked, said, _),) = answers
    assert not worked
    assert f"the bucket of {names[0]} has checksum" in said


def test_engines_leave_an_abandoned_update_at_once(both: Both) -> None:
    rank, engine, names = both
    engine.ask(DIRECT, names)
    began = time.monotonic()
    rank.abandon("weights")
    worked, said, num_loaded = engine.answer()
    assert (worked, num_loaded) == (False, 0)
    assert "the trainer has given this update up" in said
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("load_format", [DIRECT, "flattened_bucket"])
def test_a_late_command_of_an_update_that_was_given_up_is_refused(
    monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    """SGLang's own method would end the server, and the plug-in's the group of the present update."""

    def original(*words: Any) -> tuple[bool, str]:
        raise AssertionError("SGLang's method ends the process")

    abandoned, present = object(), object()
    groups = {"present": present}
    updater = SimpleNamespace(_model_update_group=groups)
    receive = partial(DirectUpdates().around_receive, original, updater, ("one",), (), (), load_format=load_format)
    assert receive(group_name="before") == (False, "there is no group before: its update was given up")
    groups["before"] = abandoned
    monkeypatch.setattr(group_abort, "is_abandoned", lambda group: group is abandoned)
    monkeypatch.setattr(direct, "ranks_of_this_engine", lambda: None)
    worked, said = receive(group_name="before")
    assert not worked
    assert "the trainer has given this update up" in said
    assert groups["present"] is present


def test_abandoning_an_older_group_changes_nothing(both: Both, tmp_path: Path) -> None:
    rank, engine, names = both
    rank.abandon("an older one")
    rank.write_weights(tmp_path / "taken")
    assert rank.snapshot(is_checked=False)
    engine.ask(DIRECT, names, target=tmp_path / "received")
    assert engine.answer()[0]
    assert same(tmp_path / "taken", tmp_path / "received")
    rank._weight_sender.finish()  # noqa: SLF001 (raises if the group was given up)


def test_broadcasting_into_an_abandoned_group_raises(both: Both) -> None:
    rank, _, _ = both
    group = engines_of(rank)
    abandon(group)
    with pytest.raises(RuntimeError, match="given up"):
        weight_sender._broadcast(iter(()), group, is_checked=False)  # noqa: SLF001


AGREES = """
import sys, torch.distributed as dist
from asyncrl.engines.sglang.plugin.direct import first_failure
rank, port = map(int, sys.argv[1:3])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
print(first_failure(None, None), first_failure(None, dist.group.WORLD),
      first_failure("broken" if rank == 1 else None, dist.group.WORLD), sep="; ")
"""


def test_an_engine_fails_when_any_of_its_ranks_does() -> None:
    """SGLang answers with the result of its rank 0 alone."""
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, "-c", AGREES, str(rank), port], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=DEADLINE_S)[0].strip() for rank in ranks)
    assert first == "None; None; another rank of this engine failed; the server's log says why"
    assert second == "None; None; broken"


def test_a_trainer_that_times_out_abandons_the_group_and_the_engines_notice(both: Both) -> None:
    rank, engine, names = both
    engine.ask(DIRECT, names)
    never = SimpleNamespace(query=lambda: False)
    with pytest.raises(RuntimeError, match="not every engine took a bucket"):
        _wait_for(never, engines_of(rank), 0.05)
    worked, said, num_loaded = engine.answer()
    assert (worked, num_loaded) == (False, 0)
    assert "the trainer has given this update up" in said


def test_a_direct_update_of_an_unknown_bucket_is_refused(both: Both) -> None:
    _, engine, names = both
    engine.ask(DIRECT, [*names, "another"])
    worked, said, num_loaded = engine.answer()
    assert (worked, num_loaded) == (False, 0)
    assert "another" in said


@pytest.mark.parametrize("num_bytes", [1, 4, 7, 4_000, 40_000_001])
def test_a_checksum_changes_with_any_byte_and_any_order(num_bytes: int) -> None:
    flat = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = checksum(flat)
    for place in {0, num_bytes // 2, num_bytes - 1}:
        flat[place] += 1
        assert checksum(flat) != before
        flat[place] -= 1
    assert checksum(flat) == before
    if num_bytes >= 4_000:
        flat[:8] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
        before = checksum(flat)
        flat[:8] = torch.tensor([5, 6, 7, 8, 1, 2, 3, 4])
        assert checksum(flat) != before


def test_views_are_parts_of_the_buffer() -> None:
    flat = torch.zeros(16, dtype=torch.uint8)
    first, second = views(flat, ("bfloat16", "float32"), ((2, 2), (2,)))
    first.fill_(1.0)
    second.fill_(2.0)
    assert flat.view(torch.float32)[2:].tolist() == [2.0, 2.0]
    assert flat.view(torch.bfloat16)[:4].tolist() == [1.0] * 4


def test_loaders_run_after_the_bucket_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that reads a number on a GPU would wait without a deadline for a bucket of which a member has died."""
    done = []
    model = SimpleNamespace(parameters=list, load_weights=lambda tensors: done.append("loaded"))
    updater = SimpleNamespace(device="cpu", get_model=lambda: model)
    monkeypatch.setattr(direct, "broadcast", lambda flat, group: None)
    monkeypatch.setattr(direct, "wait", lambda *about: None)
    monkeypatch.setattr(direct, "finish", lambda *about: done.append("arrived"))
    hook = direct.DirectUpdates()
    hook._receive_bucket(updater, CHANNEL, ["w"], ["uint8"], [[4]])  # noqa: SLF001
    assert done == ["arrived", "loaded", "arrived"]
    done.clear()
    hook._receive_all(updater, [CHANNEL], ["w"], is_checked=False)  # noqa: SLF001 (loaded again: nothing was copied)
    assert done == ["arrived", "loaded", "arrived"]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> tuple[SimpleNamespace, direct.DirectUpdates, list[Any]]:
    """An updater of a model with three weights, its hook without a network, and a list of its operations in order."""
    weights = {"a": torch.zeros(4), "b": torch.zeros(2, 2), "c": torch.zeros(3, dtype=torch.bfloat16)}
    done, copy = list[Any](), torch._foreach_copy_

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            weights[name].copy_(tensor)

    def noted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        done.append({(each.dtype, each.stride()) for each in (*targets, *sources)})
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    monkeypatch.setattr(direct, "broadcast", lambda flat, group: done.append("asked"))
    monkeypatch.setattr(direct, "wait", lambda coming, flat, group: flat.fill_(1))
    monkeypatch.setattr(direct, "check_arrival", lambda flat, group, name: None)
    monkeypatch.setattr(RecordedBucket, "check", lambda bucket, number: done.append("checked"))
    model = SimpleNamespace(
        parameters=weights.values, named_parameters=weights.items, named_buffers=tuple, load_weights=load
    )
    updater, hook = SimpleNamespace(device="cpu", get_model=lambda: model), direct.DirectUpdates()
    for names, dtypes, shapes in ((["a", "c"], ["float32", "bfloat16"], [[4], [3]]), (["b"], ["bfloat16"], [[2, 2]])):
        hook._receive_bucket(updater, CHANNEL, names, dtypes, shapes)  # noqa: SLF001
    return updater, hook, done


def test_kernels_launched_behind_a_broadcast_were_launched_once_before(
    loaded: tuple[SimpleNamespace, direct.DirectUpdates, list[Any]],
) -> None:
    """The first launch of a kernel waits for an idle GPU, and a broadcast whose member died never ends."""
    updater, hook, done = loaded
    first = [each for each in done if each != "asked"]
    done.clear()
    hook._receive_all(updater, [CHANNEL] * 2, ["a", "b"], is_checked=False)  # noqa: SLF001
    ac, b = first[:2], first[2:]
    assert done == ["asked", *ac, *ac, "asked", *b, *b]  # tested with no broadcast under way
    done.clear()
    hook._receive_all(updater, [CHANNEL] * 2, ["a", "b"], is_checked=False)  # noqa: SLF001
    assert done == ["asked", "asked", *first]
    assert len(first) == 3


def test_checks_are_launched_with_no_broadcast_under_way(
    loaded: tuple[SimpleNamespace, direct.DirectUpdates, list[Any]],
) -> None:
    updater, hook, done = loaded
    done.clear()
    hook._receive_all(updater, [CHANNEL] * 2, ["a", "b"], is_checked=True)  # noqa: SLF001
    assert [each for each in done if isinstance(each, str)] == ["asked", "checked", "asked", "checked"]
