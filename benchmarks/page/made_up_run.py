"""Made-up runs for the page: files of samples in the format of a run, written by columns and therefore fast."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from asyncrl.rollout_log.files import file_of, schema

WORDS = ("so", "we", "add", "the", "digits", "and", "carry", "one", "wait", "check", "again", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The size of a made-up run."""

    groups: int = 4
    """Groups per step."""
    group_size: int = 4
    """Samples per group."""
    tokens: int = 24
    """Mean number of response tokens; an answer has half to one and a half times as many."""
    max_lag: int = 2
    """Largest lag of a token; each answer has tokens of two lags."""
    is_skipped: bool = False
    """Whether the trainer skipped the steps: there are no log-probs of the trainer and no advantages."""


def write_run(run_dir: Path, steps: range, shape: RunShape | None = None) -> Path:
    """Write the files of ``steps`` and one row of metrics for each; return ``run_dir``."""
    for step in steps:
        write_step(run_dir, step, shape)
    rows = [{"step": step, "time/step_s": 1.0, "mismatch/age/1/logprob_mean": 0.01 * (step % 7)} for step in steps]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return run_dir


def write_step(run_dir: Path, step: int, shape: RunShape | None = None, seed: int = 0) -> Path:
    """Write the file of one step.  Answer and reward of a sample depend on step, place and ``seed`` alone."""
    path = file_of(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = _columns(step, shape or RunShape(), np.random.default_rng((step, seed)))
    count = len(columns["step"])
    arrays = [_array(columns[each.name], each.type, count) for each in _schema()]
    table = pa.Table.from_arrays(arrays, schema=_schema())
    pq.write_table(table, path, compression="zstd", compression_level=1)
    return path


@cache
def _schema() -> Any:
    return schema()


def _columns(step: int, shape: RunShape, random: np.random.Generator) -> dict[str, Any]:
    count = shape.groups * shape.group_size
    groups = step * shape.groups + np.arange(count) // shape.group_size
    lengths = random.integers(shape.tokens // 2, shape.tokens + shape.tokens // 2 + 1, count)
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    words = random.integers(0, len(WORDS), edges[-1])
    logprobs = -random.exponential(0.3, edges[-1])
    trainer = None if shape.is_skipped else (edges, logprobs + random.normal(0, 0.02, edges[-1]))
    rewards = random.integers(0, 2, count).astype(float)
    return {
        "step": np.full(count, step),
        "group_id": groups,
        "sample": np.arange(count) % shape.group_size,
        "rollout": np.arange(count) % shape.group_size,
        "epoch": np.full(count, groups // 500),
        "row": groups % 500,
        "prompt": [f"question {number % 500}: what is {number} + {number * 7}?" for number in groups],
        "label": [orjson.dumps(str(number * 8)).decode() for number in groups],
        "prompt_tokens": (np.arange(count + 1, dtype=np.int32) * 12, np.tile(np.arange(12), count)),
        "response": _texts(words, edges),
        "tokens": (edges, words),
        "logprobs": (edges, logprobs),
        "trainer_logprobs": trainer,
        "advantages": None if shape.is_skipped else (edges, np.repeat(rewards - rewards.mean(), lengths)),
        "loss_mask": (edges, np.ones(edges[-1])),
        "reward": rewards,
        "reward_parts": [None] * count,
        "lag": np.full(count, min(step, shape.max_lag)),
        "spans": _spans(step, lengths, shape.max_lag),
        "turns": (np.zeros(count + 1, np.int32), None),
        "finish": np.where(lengths > shape.tokens * 1.4, "length", "stop").tolist(),
        "seconds": random.uniform(0.5, 4.0, count),
        "resumed_at": np.zeros(count),
        "metadata": ["{}"] * count,
    }


def _texts(words: Any, edges: Any) -> Any:
    """Return the words of each sample, joined by spaces."""
    lists = pa.ListArray.from_arrays(edges, pa.array(WORDS).take(pa.array(words)))
    return pc.binary_join(lists, " ")


def _spans(step: int, lengths: Any, max_lag: int) -> tuple[Any, Any]:
    """Return two spans of each sample: the first half is written by weights one step older than the second half's."""
    old = max(0, step - max_lag)
    versions = np.tile([old, min(step, old + 1)], len(lengths))
    starts = np.column_stack([np.zeros_like(lengths), lengths // 2]).ravel()
    stops = np.column_stack([lengths // 2, lengths]).ravel()
    columns = {"version": versions, "step": versions, "start": starts, "stop": stops}
    kind = _schema().field("spans").type.value_type
    arrays = [pa.array(columns[each.name]).cast(each.type) for each in kind]
    return np.arange(0, 2 * len(lengths) + 1, 2, np.int32), pa.StructArray.from_arrays(arrays, fields=list(kind))


def _array(values: Any, kind: Any, count: int) -> Any:
    """Return an array of a column; lists are edges and values, or None if all are empty."""
    if isinstance(values, tuple):
        edges, inner = values
        inner = pa.array([], kind.value_type) if inner is None else inner
        inner = inner if isinstance(inner, pa.Array) else pa.array(inner).cast(kind.value_type, safe=False)
        return pa.ListArray.from_arrays(edges, inner, type=kind)
    if values is None:
        return pa.nulls(count, kind)
    if isinstance(values, list):
        return pa.array(values, kind)
    return (values if isinstance(values, pa.Array) else pa.array(values)).cast(kind, safe=False)
