"""Run directories with made-up numbers."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson


def row(step: int, **numbers: float) -> dict[str, Any]:
    """A row of metrics; names of ``numbers`` have ``__`` in place of a slash."""
    plain = {
        "step": step,
        "reward/mean": 0.2 + 0.01 * step,
        "reward/std": 0.4,
        "tokens/trained": 1000.0 * (step + 1),
        "time/step_s": 2.0,
        "time/trainer_waited_s": 1.0,
        "time/engines_idle_s": 0.0,
        "lag/max": 1,
        "lag/mean": 0.5,
    }
    return plain | {name.replace("__", "/"): value for name, value in numbers.items()}


def write_run(folder: Path, num_steps: int = 20, settings: Mapping[str, Any] | None = None, **numbers: float) -> Path:
    """Write a run directory with ``num_steps`` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row(step, **numbers) for step in range(num_steps)]
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in rows))
    (folder / "versions.json").write_bytes(orjson.dumps({"python": "3.12", "commit": "abc"}))
    lines = [
        f"{name} = {orjson.dumps(value).decode()}"
        for name, value in ({"num-rollout": 40} | dict(settings or {})).items()
    ]
    (folder / "sums.toml").write_text("\n".join(lines) + "\n")
    return folder


def write_status(folder: Path, **fields: Any) -> None:
    """Write ``status.json`` of a run on another host, unless ``fields`` say otherwise."""
    plain = {"host": "elsewhere", "pid": 1, "process_began": 0.0, "began": time.time() - 60}
    (folder / "status.json").write_bytes(orjson.dumps(plain | fields))
