"""Costs fitted to one arrangement that ``benchmarks.sync_vs_async`` ran.

results.json, timeline.json ──▶ one arrangement's answers, steps and updates ──▶ costs

Nothing of the other arrangements is used, so that they can be predicted.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from asyncrl.errors import ConfigError, DataError
from asyncrl.metrics.timeline import TIMELINE_FILE
from asyncrl.sim.calibration.measured import Recorded, read_timeline
from asyncrl.sim.calibration.pace import Experts, Pace, fit_pace
from asyncrl.sim.calibration.squares import not_negative
from asyncrl.sim.calibration.tables import Value
from asyncrl.sim.model.costs import Costs, TrainerCosts, UpdateCosts
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.figures import ArrangementRun, Setup

PREFERRED = ("S=2", "S=1", "S=3", "S=4", "sync")
"""Arrangements to calibrate on, in order of preference.  At S = 2 engines run with few requests and with many; a larger
S seldom has few, and a smaller one seldom has many."""
MOST_ERROR = 0.05
"""Largest residual of the preferred run, as a share of an answer's time.  A larger one means that something else took
time, such as compiling kernels in the first run after a start.  The run with the smallest residual is taken then."""
COLD = 1
"""Steps at the start of a run, in which a new trainer compiles its kernels."""


type _Fit = tuple[ArrangementRun, Recorded, Pace]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Fitted costs, and a description of the fit."""

    costs: Costs
    about: str


def calibrate_on(file: Path, setup: Setup, runs: Sequence[ArrangementRun]) -> Calibrated:
    """Fit to one of the runs in ``file``, with the timeline in the same folder.  Raises ConfigError or DataError."""
    run, recorded, pace = _chosen(file, setup, _candidates(file, runs))
    trainer, error = _trainer(setup, run.rows[COLD:])
    costs = Costs(engine=pace.costs, trainer=trainer, update=_update(run, recorded), step_overhead_s=_overhead(run))
    about = (
        f"Fitted to {run.arrangement} of {file}: {pace.num_answers} answers, {len(run.rows)} steps. Mean absolute "
        f"residual: {pace.error:.1%} of an answer's time, {error:.1%} of a training step's."
    )
    return Calibrated(costs=costs, about=about)


def tables(costs: Costs) -> dict[str, dict[str, Value]]:
    """The tables of a calibration file."""
    found = {"engine": asdict(costs.engine), "trainer": asdict(costs.trainer), "update": asdict(costs.update)}
    return {**found, "controller": {"step_overhead_s": costs.step_overhead_s}}


def _candidates(file: Path, runs: Sequence[ArrangementRun]) -> list[ArrangementRun]:
    """The first long enough run of each arrangement, the preferred one first.  Raises ConfigError if there is none."""
    long_enough = {run.arrangement: run for run in reversed(runs) if len(run.rows) > COLD + 1}
    found = [long_enough[name] for name in PREFERRED if name in long_enough]
    if not found:
        raise ConfigError(f"{file}: no run of {', '.join(PREFERRED)} with {COLD + 2} steps to calibrate on")
    return found


def _fitted(file: Path, setup: Setup, run: ArrangementRun) -> _Fit:
    recorded = _recorded(file.parent, run)
    return run, recorded, _pace(setup, run, recorded)


def _chosen(file: Path, setup: Setup, runs: Sequence[ArrangementRun]) -> _Fit:
    preferred, *others = runs
    fits = [_fitted(file, setup, preferred)]
    if fits[0][2].error > MOST_ERROR:
        for run in others:
            with suppress(DataError):  # too short to fit
                fits.append(_fitted(file, setup, run))
    return min(fits, key=lambda fit: fit[2].error)


def _recorded(folder: Path, run: ArrangementRun) -> Recorded:
    files = [path for path in (folder / TIMELINE_FILE, folder / f"{TIMELINE_FILE}.xz") if path.exists()]
    train_s = [row["time/train_s"] for row in run.rows]
    return read_timeline(files[0] if files else folder / TIMELINE_FILE).run(int(run.rows[0]["version"]), train_s)


def _pace(setup: Setup, run: ArrangementRun, recorded: Recorded) -> Pace:
    shape = SHAPES[setup.model]
    experts = shape.get("num_experts")
    end_s = recorded.updates[-1].stop_s
    return fit_pace(
        recorded.samples,
        [(update.start_s, update.stop_s) for update in recorded.updates],
        num_engines=setup.engine_gpus,
        prompt_tokens=setup.prompt_tokens,
        experts=Experts(num=experts, per_token=shape["num_experts_per_tok"]) if experts else None,
        until_s=end_s if run.staleness else float("inf"),  # synchronous steps leave no answer unfinished
    )


def _trainer(setup: Setup, rows: Sequence[Mapping[str, float]]) -> tuple[TrainerCosts, float]:
    """Least squares over the steps; returns the costs and the mean residual as a share."""
    prompts = setup.groups * setup.group_size * setup.prompt_tokens
    tokens = np.array([row["response/tokens_mean"] * setup.groups * setup.group_size + prompts for row in rows])
    seconds = np.array([row["time/train_s"] for row in rows])
    columns = np.stack([np.ones(len(rows)), tokens], axis=1)
    found = not_negative(columns, seconds)
    rate = 1 / max(float(found[1]), 1e-9) / setup.trainer_gpus  # a nanosecond per token counts as none
    error = float(np.mean(np.abs(columns @ found - seconds)) / np.mean(seconds))
    return TrainerCosts(fixed_s=float(found[0]), tokens_per_s_per_gpu=rate), error


def _update(run: ArrangementRun, recorded: Recorded) -> UpdateCosts:
    """Costs of the updates.  The trainer resumes after a snapshot that ends before its update, else after that."""
    both = list(zip(recorded.steps, recorded.updates, strict=True))
    freed = [
        any(step.stop_s <= start and stop <= update.start_s for start, stop in recorded.taken) for step, update in both
    ]
    return UpdateCosts(
        pause_s=median(row["time/update_pause_s"] for row in run.rows),
        take_s=median(update.start_s - step.stop_s for step, update in both),
        holds_trainer=not any(freed),
    )


def _overhead(run: ArrangementRun) -> float:
    """Seconds of a step spent neither waiting, training, nor on the weights."""
    parts = ("time/trainer_waited_s", "time/train_s")
    return max(0.0, median(row["time/step_s"] - sum(row[name] for name in parts) - _held_s(row) for row in run.rows))


def _held_s(row: Mapping[str, float]) -> float:
    """Seconds that the trainer waited for its weights; in results without that number, the whole update."""
    return row.get("time/update_wait_s", row["time/update_s"])
