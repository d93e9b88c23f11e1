"""Made-up runs for the page: files of samples in the format of a run, written by columns and therefore fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa  # type: ignore[import-untyped]
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
    arrays = [_array(columns[each.name], each.type, count) for each in schema()]
    table = pa.Table.from_arrays(arrays, schema=schema())
    pq.write_table(table, path, compression="zstd", compression_level=1)
    return path


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
        "response": [_text(words[edges[place] : edges[place + 1]]) for place in range(count)],
        "tokens": (edges, words),
        "logprobs": (edges, logprobs),
        "trainer_logprobs": trainer,
        "advantages": None if shape.is_skipped else (edges, np.repeat(rewards - rewards.mean(), lengths)),
        "loss_mask": (edges, np.ones(edges[-1])),
        "reward": rewards,
        "reward_parts": [None] * count,
        "lag": np.full(count, min(step, shape.max_lag)),
        "spans": [_spans(step, int(length), shape.max_lag) for length in lengths],
        "turns": [[] for _ in range(count)],
        "finish": ["length" if length > shape.tokens * 1.4 else "stop" for length in lengths],
        "seconds": random.uniform(0.5, 4.0, count),
        "resumed_at": np.zeros(count),
        "metadata": ["{}"] * count,
    }


def _text(words: Any) -> str:
    return " ".join(WORDS[place] for place in words)


def _spans(step: int, length: int, max_lag: int) -> list[dict[str, int]]:
    """Return two spans: the first half is written by weights one step older than those of the second half."""
    old = max(0, step - max_lag)
    new, half = min(step, old + 1), length // 2
    return [
        {"version": old, "step": old, "start": 0, "stop": half},
        {"version": new, "step": new, "start": half, "stop": length},
    ]


def _array(values: Any, kind: Any, count: int) -> Any:
    if isinstance(values, tuple):
        edges, numbers = values
        return pa.ListArray.from_arrays(edges, pa.array(numbers).cast(kind.value_type, safe=False), type=kind)
    if values is None:
        return pa.nulls(count, kind)
    return pa.array(values, kind) if isinstance(values, list) else pa.array(values).cast(kind, safe=False)
