"""A made-up run directory with many steps and samples."""

from pathlib import Path

import orjson

from benchmarks.page.made_timeline import write_timeline
from benchmarks.page.made_up_run import RunShape, write_step

GROUP_SIZE = 4


def make_run(
    folder: Path, *, steps: int, samples: int, tokens: int = 64, num_files: int | None = None, timed: int | None = None
) -> None:
    """Write a run directory with a row for each step, and ``samples`` in each of the newest ``num_files`` steps.

    The timeline has the first ``timed`` steps.  None stands for all steps.  Answers have ``tokens`` on average.
    """
    shape = RunShape(groups=samples // GROUP_SIZE, group_size=GROUP_SIZE, tokens=tokens)
    for step in range(steps - (steps if num_files is None else num_files), steps):
        write_step(folder, step, shape)
    write_timeline(folder, steps=steps if timed is None else timed, samples_per_step=samples)
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(_row(step)) + b"\n" for step in range(steps)))
    (folder / "versions.json").write_text("{}")


def _row(step: int) -> dict[str, float]:
    """Return a row of 100 numbers, about as many as a run reports."""
    plain = {"step": step, "time/step_s": 10.0, "time/trainer_waited_s": 5.0, "time/engines_idle_s": 0.5}
    plain |= {"reward/mean": step % 97 / 97, "reward/std": 0.4, "lag/max": 2, "lag/mean": 1.0, "train/loss": 0.01}
    return plain | {f"filter/reason{number}": step * number for number in range(100)}
