"""The samples of each trained step, one Parquet file per step in ``run_dir/rollouts``.

report ──groups and the trainer's numbers──▶ queue ──▶ a daemon thread ──▶ rollouts/step-000123.parquet

waits for     the disk, in the thread only
on failure    one warning; the step has no file, and the next one is tried again
on exit       files that wait are written, for at most ``CLOSING_S``

A file appears whole or not at all: it is written under another name and renamed.  pandas, polars and DuckDB read all of
them at once, also during the run and after it was killed.
"""

import json
import logging
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from asyncrl.daemon_threads import DaemonThreads
from asyncrl.rollout_log.whole_file import write_whole
from asyncrl.types import Batch, ScoredGroup, ScoredSample, TrainReport
from asyncrl.unhurried import unhurried

logger = logging.getLogger(__name__)

ROLLOUTS_FOLDER = "rollouts"
MOST_WAITING = 2
"""Steps of any size that may wait for their files."""
MOST_TOKENS = 2_000_000
"""Tokens that may wait in more steps; further steps get no file, because they would fill the memory."""
CLOSING_S = 30.0
"""Seconds for the files that wait when the run ends."""
_REPEATED = ("prompt", "label", "finish", "metadata")
"""Columns with few different values; dictionaries of the others would cost time and save nothing."""
_NUMBERS_AT_ONCE = 8192
"""Numbers of a list that one call converts, in 0.2 ms at most."""
_NUMBERS_TOGETHER = 2048
"""Numbers of short lists that one call converts, in 0.1 ms at most."""
_ROWS_AT_ONCE = 128
"""Rows of which one call converts the texts or the spans."""
_FEW_TOKENS = 100_000
"""Tokens of a step up to which snappy compresses its file.  zstd costs each column 0.04 ms before its first byte."""
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it, modulo 2^64, are spread evenly."""


def file_of(run_dir: Path, step: int) -> Path:
    """Return the path of the file of a training step, which is counted from 0."""
    return run_dir / ROLLOUTS_FOLDER / f"step-{step:06d}.parquet"


def times_of(run_dir: Path) -> dict[str, int]:
    """Return when each step's file in ``run_dir`` was written, in nanoseconds, by the name of the file.

    A folder that cannot be read has none.
    """
    found: dict[str, int] = {}
    with suppress(OSError), os.scandir(run_dir / ROLLOUTS_FOLDER) as entries:
        for entry in entries:
            found[entry.name] = entry.stat().st_mtime_ns
    return found


class RolloutFiles:
    """Writes the groups of each step, or a share of them, in a separate thread.  No method raises OSError."""

    def __init__(self, run_dir: Path, share: float = 1.0) -> None:
        """``share``: the part of the groups that is written, 0 to 1; every step has at least one group.

        Importing pyarrow takes 0.2 s, so it is imported here, before a run begins.
        """
        schema()
        self._run_dir = run_dir
        self._share = share
        self._thread = DaemonThreads(1, "rollouts")
        self._waiting = deque[tuple[Future[None], int]]()
        """The steps that wait, with their tokens."""
        self._num_skipped = self._num_failed = 0
        self._is_failing = False

    @property
    def num_waiting(self) -> int:
        """Number of steps whose files are not written yet."""
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        return len(self._waiting)

    def write(self, batch: Batch, report: TrainReport) -> None:
        """Write a step's file later.  Costs the caller microseconds."""
        num_tokens = sum(group.num_tokens for group in batch.groups)
        if self.num_waiting >= MOST_WAITING and num_tokens + sum(each for _, each in self._waiting) > MOST_TOKENS:
            self._num_skipped += 1
            if self._num_skipped == 1:
                text = "step %d: its samples are not written, because the disk is slower than training: %s"
                logger.warning(text, batch.step, self._run_dir / ROLLOUTS_FOLDER)
            return
        self._waiting.append((self._thread.submit(self._write, batch, report), num_tokens))

    def close(self) -> None:
        """Wait for the files that are not written yet, at most ``CLOSING_S`` seconds."""
        _, late = wait([file for file, _ in self._waiting], CLOSING_S)
        self._thread.shutdown()
        if missing := self._num_skipped + self._num_failed + len(late):
            logger.warning("%s: %d steps have no file", self._run_dir / ROLLOUTS_FOLDER, missing)

    def _write(self, batch: Batch, report: TrainReport) -> None:
        path = file_of(self._run_dir, batch.step)
        try:
            rows = list(unhurried(rows_of(batch, report, self._share)))
            is_small = sum(len(row["tokens"]) for row in rows) <= _FEW_TOKENS
            write_whole(path, lambda partial: write_rows(partial, [rows], "snappy" if is_small else "zstd"))
        except Exception as error:  # noqa: BLE001 (whatever fails here must not end the run)
            self._note_failure(path, error)
        else:
            self._is_failing = False

    def _note_failure(self, path: Path, error: Exception) -> None:
        self._num_failed += 1
        if not self._is_failing:
            self._is_failing = True
            logger.warning("%s: not written: %s; the run continues, and the next step is tried again", path, error)


def rows_of(batch: Batch, report: TrainReport, share: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield one row for each sample of the groups that are chosen; ``schema`` has their meaning."""
    chosen = {group.group_id for group in batch.groups if _is_chosen(group.group_id, share)}
    chosen = chosen or {group.group_id for group in batch.groups[:1]}
    numbers = _by_sample(batch, report)
    for place, (group, scored) in enumerate(_samples(batch)):
        if group.group_id in chosen:
            yield _row(batch.step, group, scored, *numbers[place])


def _is_chosen(group_id: int, share: float) -> bool:
    return group_id * _GOLDEN % 2**64 < share * 2**64


def _samples(batch: Batch) -> Iterator[tuple[ScoredGroup, ScoredSample]]:
    return ((group, scored) for group in batch.groups for scored in group.samples)


def _by_sample(batch: Batch, report: TrainReport) -> Sequence[tuple[Any, Any]]:
    """Return the trainer's log-probs and advantages of each sample, in batch order; None for a skipped step."""
    count = sum(len(group.samples) for group in batch.groups)
    logprobs = report.logprobs or (None,) * count
    return list(zip(logprobs, report.advantages or (None,) * count, strict=True))


def _row(step: int, group: ScoredGroup, scored: ScoredSample, logprobs: Any, advantages: Any) -> dict[str, Any]:
    sample, prompt = scored.sample, group.prompt
    spans = [
        {"version": span.weights.version, "step": span.weights.step, "start": span.start, "stop": span.stop}
        for span in sample.spans
    ]
    trained = [span for span in sample.spans if any(scored.loss_mask[span.start : span.stop])]
    return {
        "step": step,
        "group_id": group.group_id,
        "sample": sample.index,
        "rollout": sample.rollout,
        "epoch": prompt.epoch,
        "row": prompt.row,
        "prompt": prompt.text,
        "label": _json(prompt.label),
        "prompt_tokens": prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids,
        "response": sample.text,
        "tokens": sample.token_ids,
        "logprobs": sample.logprobs,
        "trainer_logprobs": logprobs,
        "advantages": advantages,
        "loss_mask": scored.loss_mask,
        "reward": scored.reward,
        "reward_parts": _json(scored.reward_parts) if scored.reward_parts else None,
        "lag": max((step - span.weights.step for span in trained), default=None),
        "spans": spans,
        "turns": [_turn(turn) for turn in sample.turns],
        "finish": sample.finish.value,
        "seconds": sample.seconds,
        "resumed_at": sample.resumed_at,
        "metadata": _json({**prompt.metadata, **sample.metadata}) if prompt.metadata or sample.metadata else "{}",
    }


def _turn(turn: Any) -> dict[str, Any]:
    return {
        "call": turn.call,
        "start": turn.start,
        "stop": turn.stop,
        "finish": turn.finish.value,
        "reward": turn.reward,
    }


def _json(value: object) -> str:
    """Return ``value`` as JSON; what JSON does not have becomes its ``repr``."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    try:
        return orjson.dumps(value, default=repr, option=options).decode()
    except TypeError:  # an integer above 64 bits, half a character, a cycle
        return _json_with_huge_integers(value)


def _json_with_huge_integers(value: object) -> str:
    try:
        text = json.dumps(value, default=repr, allow_nan=False, ensure_ascii=False)
        text.encode()  # fails for half a character
    except (TypeError, ValueError, RecursionError):
        return orjson.dumps(ascii(value)).decode()
    return text


@cache
def schema() -> Any:
    """Return the pyarrow schema of a file; the metadata of each field has its meaning under ``comment``."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    ints, floats = pa.int32(), pa.float32()
    span = pa.struct([("version", ints), ("step", ints), ("start", ints), ("stop", ints)])
    turn = pa.struct([("call", ints), ("start", ints), ("stop", ints), ("finish", pa.string()), ("reward", floats)])
    columns = (
        ("step", ints, "Training step, from 0."),
        ("group_id", pa.int64(), "Group; the samples of one prompt in one step have the same."),
        ("sample", ints, "Position in the group, from 0."),
        ("rollout", ints, "Position in the group of the episode that made the sample, else `sample`."),
        ("epoch", ints, "Pass over the prompts, from 0."),
        ("row", pa.int64(), "Row of the prompts, from 0."),
        ("prompt", pa.string(), "Text of the prompt, after the chat template."),
        ("label", pa.string(), "Label of the prompt, as JSON."),
        ("prompt_tokens", pa.list_(ints), "Token ids before the first response token."),
        ("response", pa.string(), "Text of the response."),
        ("tokens", pa.list_(ints), "Token ids of the response."),
        ("logprobs", pa.list_(floats), "Log-probs under the policy that sampled; 0 at observations, NaN if unknown."),
        (
            "trainer_logprobs",
            pa.list_(floats),
            "The trainer's log-probs before the step; null if it was skipped, or without a trainer.",
        ),
        ("advantages", pa.list_(floats), "Advantages; null if the step was skipped, or without a trainer."),
        ("loss_mask", pa.list_(pa.int8()), "1 at tokens in the loss, else 0."),
        ("reward", pa.float64(), "Reward of the sample."),
        ("reward_parts", pa.string(), "Entries of a dict reward, as JSON; null if the reward is one number."),
        ("lag", ints, "Largest number of steps between sampling and training, over the tokens in the loss."),
        ("spans", pa.list_(span), "Response tokens `start` to `stop` (exclusive), by the weights that wrote them."),
        ("turns", pa.list_(turn), "Turns of an episode; empty for a single turn."),
        ("finish", pa.string(), "Reason of the end: `stop`, `length` or `abort`."),
        ("seconds", pa.float64(), "Seconds from dispatch, or from the last resumption, to the last token."),
        ("resumed_at", ints, "Tokens that were there when the answer was last resumed; 0 without interruption."),
        ("metadata", pa.string(), "Metadata of prompt and sample, as JSON."),
    )
    return pa.schema([pa.field(name, kind, metadata={"comment": text}) for name, kind, text in columns])


def write_rows(
    path: Path, parts: Iterable[Sequence[Mapping[str, Any]]], compression: Literal["snappy", "zstd"] = "zstd"
) -> None:
    """Write rows of ``rows_of`` to a file, part by part.  Raises OSError or pyarrow's errors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    options: dict[str, Any] = {"compression": compression, "use_dictionary": list(_REPEATED)}
    options |= {"compression_level": 1} if compression == "zstd" else {}
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema(), **options) as writer:
            for rows in parts:
                columns = [_column([row[field.name] for row in rows], field.type) for field in unhurried(schema())]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema()))
        file.flush()
        os.fsync(file.fileno())


def _column(values: Sequence[Any], kind: Any) -> Any:
    """Return a column of pyarrow.  No call holds the GIL for more than a fraction of a millisecond."""
    import pyarrow as pa

    are_numbers = pa.types.is_list(kind) and not pa.types.is_struct(kind.value_type)
    if len(values) <= _ROWS_AT_ONCE and (not are_numbers or _num_numbers(values) <= _NUMBERS_TOGETHER):
        return pa.array(values, kind)
    if not are_numbers:
        parts = (values[start : start + _ROWS_AT_ONCE] for start in range(0, len(values), _ROWS_AT_ONCE))
        return pa.chunked_array([pa.array(part, kind) for part in unhurried(parts)], kind)
    lists = [() if each is None else each for each in values]
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int32)
    numbers = np.empty(offsets[-1], kind.value_type.to_pandas_dtype())
    for start, part in unhurried(_parts(lists, numbers.dtype)):
        numbers[start : start + len(part)] = part
    mask = pa.array([each is None for each in values])
    return pa.ListArray.from_arrays(offsets, pa.array(numbers), type=kind, mask=mask)


def _num_numbers(lists: Sequence[Sequence[float] | None]) -> int:
    return sum(0 if each is None else len(each) for each in lists)


def _parts(lists: Iterable[Sequence[float]], dtype: np.dtype[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the numbers of the lists as arrays, each with its place in all of them together.

    Neighbouring short lists make one array, since a call for each of them would cost more than their numbers.
    """
    place = num_short = 0
    short: list[Sequence[float]] = []
    for each in lists:
        if short and num_short + len(each) > _NUMBERS_TOGETHER:
            yield place - num_short, np.fromiter(chain.from_iterable(short), dtype, num_short)
            short, num_short = [], 0
        if len(each) <= _NUMBERS_TOGETHER:
            short.append(each)
            num_short += len(each)
        else:
            for start in range(0, len(each), _NUMBERS_AT_ONCE):
                yield place + start, _numbers(each[start : start + _NUMBERS_AT_ONCE], dtype)
        place += len(each)
    if short:
        yield place - num_short, np.fromiter(chain.from_iterable(short), dtype, num_short)


def _numbers(values: Sequence[float], dtype: np.dtype[Any]) -> Any:
    """Return ``values`` as numpy's array.  A tuple is read by ``array`` in half the time that numpy needs."""
    if isinstance(values, array):
        return np.asarray(values)
    return np.frombuffer(array(dtype.char, values), dtype)
