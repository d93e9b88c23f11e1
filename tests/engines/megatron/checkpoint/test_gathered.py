"""The gathered state of a distributed optimizer is Megatron's own, in memory that is kept from save to save.

Several ranks gather in pieces in ``train/test_parallel_training``, which also compares the state with Megatron's.
"""

import random
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from asyncrl.engines.megatron.checkpoint import gathered, saver
from asyncrl.engines.megatron.checkpoint.directory import Origin, folder_of
from asyncrl.engines.megatron.checkpoint.host_memory import BLOCK_BYTES, CheckpointMemory
from asyncrl.errors import CheckpointFailed
from tests.engines.megatron.checkpoint.gathered_state import gathered_as_by_megatron
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings, write_checkpoint
from tests.save_targets import target as target_of

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls by Megatron

SMALL_PIECE = 1000
"""Values per piece: less than most parameters have, and not a divisor of any."""
SLOW_S = 1.0
"""Seconds that a slow save takes."""
LATE_S = 1.0
"""Seconds after which a save that stands still is late; any other save has the time of a run."""


@pytest.mark.parametrize(("moe", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_the_state_is_the_one_of_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moe: bool, dtype: str
) -> None:
    monkeypatch.setattr(gathered, "PIECE", SMALL_PIECE)
    host = CheckpointMemory()
    with one_rank(trainer_settings(write_checkpoint(tmp_path, moe=moe), dtype=dtype)) as rank:
        rank.train(random_batch())
        ours = gathered_as_by_megatron(rank._learner, host)  # noqa: SLF001
    of_optimizer = [each for (name, _), each in ours.items() if name.startswith("optimizer")]
    for each in of_optimizer:
        assert host.has(each.data)
        assert each.data.untyped_storage().nbytes() == each.data.numel() * 4, "Megatron would copy it"
    assert len(of_optimizer) > len(ours) / 2


def test_a_second_save_has_the_state_of_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is that of the first save, for which it waits."""
    write = saver._write_file  # noqa: SLF001

    def slow(writer: Any, bucket: Any) -> Any:
        time.sleep(SLOW_S)
        return write(writer, bucket)

    monkeypatch.setattr(saver, "_write_file", slow)
    settings = trainer_settings(write_checkpoint(tmp_path / "hf"))
    with one_rank(settings) as rank:
        for step in range(2):
            rank.train(random_batch(seed=step, step=step))
            rank.begin_checkpoint(target_of(tmp_path / "saved", step + 1), {}, with_optimizer=True)
        rank.finish_checkpoint()
        straight = rank.train(random_batch(seed=2, step=2))
    for saved in (1, 2):
        with one_rank(settings) as rank:
            rank.load(Origin(folder=folder_of(tmp_path / "saved", saved), kind="resume", optimizer=True))
            after = [rank.train(random_batch(seed=step, step=step)) for step in range(saved, 3)]
        assert (after[-1].loss, after[-1].grad_norm) == (straight.loss, straight.grad_norm)
        assert after[-1].logprobs == straight.logprobs


def test_a_save_that_is_late_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may still write when the next save begins."""
    settings = trainer_settings(write_checkpoint(tmp_path / "hf"))
    begun, ends, is_same, write = Event(), Event(), list[bool](), saver._write_file  # noqa: SLF001

    def late(writer: Any, bucket: Any) -> Any:
        tensors = [tensor for _, tensor in bucket[2][1]]
        before = [tensor.clone() for tensor in tensors]
        begun.set()
        assert ends.wait(60.0)
        is_same.append(all(map(torch.equal, before, tensors)))
        ends.clear()
        return write(writer, bucket)

    with one_rank(settings) as rank:
        rank.train(random_batch(seed=0, step=0))
        monkeypatch.setattr(saver, "_write_file", late)
        rank.begin_checkpoint(target_of(tmp_path / "saved", 1), {}, with_optimizer=True)
        assert begun.wait(60.0)
        monkeypatch.setattr(saver, "_write_file", write)
        with monkeypatch.context() as soon, pytest.raises(CheckpointFailed, match="not written within"):
            soon.setattr(rank._saver, "_timeout_s", LATE_S)  # noqa: SLF001
            rank.finish_checkpoint()
        rank.train(random_batch(seed=1, step=1))
        rank.begin_checkpoint(target_of(tmp_path / "saved", 2), {}, with_optimizer=True)
        rank.finish_checkpoint()
        ends.set()
        while ends.is_set():
            time.sleep(0.01)
    assert is_same == [True]


def test_an_error_without_text_is_named_by_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise AssertionError

    with one_rank(trainer_settings(write_checkpoint(tmp_path / "hf"))) as rank:
        for name in ("commit", "open_partial"):
            monkeypatch.setattr(saver, name, failing)
            with pytest.raises(CheckpointFailed, match=r"iter_0000001( cannot be written)?: AssertionError$"):
                rank.begin_checkpoint(target_of(tmp_path / "saved", 1), {}, with_optimizer=True)
                rank.finish_checkpoint()


def test_memory_is_kept_by_name() -> None:
    host = CheckpointMemory()
    first = host.tensor("first", (3, 5), torch.float32).fill_(1.0)
    second = host.tensor("second", (7,), torch.bfloat16).fill_(2.0)
    large = host.tensor("large", (BLOCK_BYTES + 1,), torch.uint8)
    third = host.tensor("third", (), torch.int64).fill_(3)
    assert host.tensor("first", (3, 5), torch.float32).data_ptr() == first.data_ptr()
    assert (first == 1.0).all()
    assert (second == 2.0).all()
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in (first, second, large, third))
    assert all(host.has(each) for each in (first, second, large, third, first[1:]))
    assert not host.has(torch.zeros(3))
    with pytest.raises(AssertionError, match=r"first was torch\.float32"):
        host.tensor("first", (5, 3), torch.float32)


@pytest.mark.parametrize("code", [0, 2])
def test_memory_is_pinned_where_there_is_a_gpu_and_serves_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    asked = list[int]()

    class Runtime:
        def cudaHostRegister(self, _where: int, num_bytes: int, _flags: int) -> int:
            asked.append(num_bytes)
            return code

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    host = CheckpointMemory()
    for name in range(2):
        host.tensor(name, (BLOCK_BYTES,), torch.uint8)
    assert asked == [BLOCK_BYTES] * 2
    assert ("could not pin" in caplog.text) == (code != 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_piece_shares_with_unordered_and_empty_runs_what_lies_in_both(seed: int) -> None:
    rng = random.Random(seed)
    whole = torch.arange(200)
    cuts = sorted(rng.sample(range(200), 12))
    runs = [(start, whole[start:stop]) for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
    runs += [(start, whole[start:start]) for start in rng.sample(range(200), 3)]
    rng.shuffle(runs)
    start = rng.randrange(190)
    piece = torch.full((rng.randint(1, 200 - start),), -1)
    for mine, values in gathered._Runs(runs).common(start, piece):  # noqa: SLF001 (its only test without a trainer)
        mine.copy_(values)
    covered = {place for begin, values in runs for place in range(begin, begin + len(values))}
    expected = [place if place in covered else -1 for place in range(start, start + len(piece))]
    assert piece.tolist() == expected
