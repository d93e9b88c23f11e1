import asyncio
import json
import math
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from asyncrl.errors import DataError
from asyncrl.pipeline.run import skipped
from asyncrl.rollout_log import saved_batches
from asyncrl.rollout_log.batch_file import read_batch, write_batch
from asyncrl.rollout_log.files import rows_of
from asyncrl.rollout_log.saved_batches import SavedBatches
from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import Batch, FinishReason, Span, Turn
from tests.unit.metrics.made import batch, weights


def strange() -> Batch:
    """A batch with every column, an episode, and values that formats of numbers tend to change."""
    made = batch()
    first, second = made.groups[0].samples
    episode = replace(
        first.sample,
        token_ids=(3, 4, 5, 150_000),
        logprobs=array("f", [math.nan, 0.0, -0.1, -1e-30]),
        spans=(Span(weights=weights(4), start=0, stop=1), Span(weights=weights(5), start=2, stop=4)),
        turns=(
            Turn(call=0, start=0, stop=1, finish=FinishReason.STOP),
            Turn(call=1, start=2, stop=4, finish=FinishReason.LENGTH, reward=0.1),
        ),
        prompt_ids=(9, 8, 7),
        rollout_index=3,
        routes=Routes(experts_NLK=np.arange(24, dtype=np.uint16).reshape(6, 2, 2), missing=((0, 1),)),
        kept=TokenSets(counts_T=np.array([1, 0, 2, 0], np.int32), ids_I=np.array([3, 5, 6], np.int32)),
        top=TokenSets(
            counts_T=np.array([1, 0, 0, 0], np.int32),
            ids_I=np.array([3], np.int32),
            logprobs_I=np.array([-0.3], np.float32),
        ),
        metadata=dict[Any, Any](
            {
                "tuple": (1, 2.5, "x"),
                4: {"__kind__": "Batch"},
                "list": [None, True, np.int64(7)],
                "huge": (1 << 70, -(1 << 64)),
            }
        ),
    )
    samples = (replace(first, sample=episode, loss_mask=(1, 0, 1, 1), reward=0.1 + 0.2, outcome=-0.7), second)
    return replace(made, groups=(replace(made.groups[0], samples=samples, num_generated=99), *made.groups[1:]))


def test_a_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    before = strange()
    write_batch(tmp_path / "new" / "folder" / "5.batch", before)
    after = read_batch(tmp_path / "new" / "folder" / "5.batch")
    # NaN is unlike itself; its bytes are compared instead.
    assert [row.tobytes() for row in logprobs(before)] == [row.tobytes() for row in logprobs(after)]
    zeros = [without_nan(each) for each in (before, after)]
    assert zeros[0] == zeros[1]
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["5.batch"]


def logprobs(made: Batch) -> list[array[float]]:
    return [scored.sample.logprobs for group in made.groups for scored in group.samples]


def without_nan(made: Batch) -> Batch:
    first, *others = made.groups[0].samples
    sample = replace(first.sample, logprobs=array("f", [0.0] * 4))
    return replace(
        made, groups=(replace(made.groups[0], samples=(replace(first, sample=sample), *others)), *made.groups[1:])
    )


def test_a_value_that_is_not_plain_is_named(tmp_path: Path) -> None:
    made = batch()
    prompt = replace(made.groups[0].prompt, metadata={"function": print})
    with pytest.raises(DataError, match="a batch with a builtin_function_or_method cannot be saved"):
        write_batch(tmp_path / "a", replace(made, groups=(replace(made.groups[0], prompt=prompt),)))
    assert list(tmp_path.iterdir()) == []


def cycle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return found


ODD = ("\ud800", cycle(), np.array([object()]))
"""Values that neither msgpack nor JSON has."""


@pytest.mark.parametrize("value", ODD)
def test_an_odd_value_costs_a_warning_and_leaves_no_file(
    value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = batch()
    prompt = replace(made.groups[0].prompt, metadata={"odd": value})
    odd = replace(made, groups=(replace(made.groups[0], prompt=prompt), made.groups[1]))
    saved = SavedBatches(lambda step: tmp_path / "a.batch", None)
    assert asyncio.run(saved.prepared(odd)) is odd
    assert "its batch was not saved" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ODD)
def test_an_odd_value_is_written_to_the_samples_as_text(value: Any) -> None:
    made = batch()
    prompt = replace(made.groups[0].prompt, metadata={"odd": value})
    (row, *_) = rows_of(replace(made, groups=(replace(made.groups[0], prompt=prompt),)), skipped(1.0))
    assert "odd" in json.loads(row["metadata"])


def test_a_huge_integer_is_a_number_in_the_samples() -> None:
    """JSONL rows have such labels and metadata."""
    made = batch()
    prompt = replace(made.groups[0].prompt, metadata={"huge": 1 << 70, "text": "é"}, label=1 << 70)
    (row, *_) = rows_of(replace(made, groups=(replace(made.groups[0], prompt=prompt),)), skipped(1.0))
    assert json.loads(row["metadata"]) == {"huge": 1 << 70, "text": "é"}
    assert json.loads(row["label"]) == 1 << 70


@pytest.mark.parametrize("data", [b"", b"no zstd", None, 5, {"__kind__": "os.system", "command": "true"}])
def test_another_file_is_refused(data: Any, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "a"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(msgpack.packb(data))
    with pytest.raises(DataError, match="is no file of a batch"):
        read_batch(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3\.batch is no file of a batch"):
        read_batch(tmp_path / "3.batch")


class Doubled:
    async def prepared(self, batch: Batch) -> Batch:
        return replace(batch, groups=batch.groups * 2)

    async def prepared_again(self, batch: Batch) -> Batch:
        return await self.prepared(batch)


def test_a_batch_that_is_trained_again_is_not_saved_again(tmp_path: Path) -> None:
    saved = SavedBatches(lambda step: tmp_path / f"{step}.batch", Doubled())
    assert len(asyncio.run(saved.prepared_again(batch(7))).groups) == 4
    assert list(tmp_path.iterdir()) == []


def test_batches_are_saved_as_the_hooks_leave_them(tmp_path: Path) -> None:
    saved = SavedBatches(lambda step: tmp_path / f"{step}.batch", Doubled())
    prepared = asyncio.run(saved.prepared(batch(7)))
    assert read_batch(tmp_path / "7.batch") == prepared
    assert len(prepared.groups) == 4


def test_a_batch_that_cannot_be_saved_is_trained_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    saved = SavedBatches(lambda step: tmp_path / "file" / "a", None)
    assert asyncio.run(saved.prepared(batch(7))) == batch(7)
    assert "step 7: its batch was not saved" in caplog.text


def test_a_disk_that_never_answers_does_not_hold_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(saved_batches, "WRITING_S", 0.1)
    monkeypatch.setattr(saved_batches, "write_batch", lambda path, batch: answers.wait(60.0))
    saved = SavedBatches(lambda step: tmp_path / "a.batch", None)
    assert asyncio.run(saved.prepared(batch(7))) == batch(7)
    answers.set()
    assert "it took more than 0.1 s" in caplog.text
