"""The calibration of the model on a run with several engines or several GPUs of the trainer.

``calibrate`` describes one engine and one trainer that may share processors.  Here the engines' costs come from
``pace``, which knows contexts, prefills and the engine of each answer, and nothing shares processors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from asyncrl.sim.calibration.calibrate import SKIPPED_STEPS
from asyncrl.sim.calibration.measured import MeasuredRun
from asyncrl.sim.calibration.pace import fit_pace
from asyncrl.sim.calibration.squares import not_negative
from asyncrl.sim.model.costs import Costs, TrainerCosts, UpdateCosts

_TINY = 1e-9
"""Seconds per token below which a rate counts as unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCalibration:
    """Fitted costs, and mean absolute residuals as shares of the mean time."""

    costs: Costs
    sample_error: float
    step_error: float


def fit_fleet(run: MeasuredRun, prompt_tokens: int, *, num_engines: int, trainer_gpus: int) -> FleetCalibration:
    """Fit to a run that has been read.  Raises DataError if too few answers ended."""
    pace = fit_pace(
        run.samples,
        run.updates,
        num_engines=num_engines,
        prompt_tokens=prompt_tokens,
        experts=None,
        until_s=max(sample.stop_s for sample in run.samples),
    )
    trainer, step_error = _trainer(run, prompt_tokens, trainer_gpus)
    rows = run.rows[SKIPPED_STEPS:]
    update = UpdateCosts(
        pause_s=median([row.get("time/update_pause_s", 0.0) for row in rows]),
        take_s=median([row.get("time/update_wait_s", 0.0) for row in rows]),
    )
    costs = Costs(
        engine=pace.costs, trainer=trainer, update=update, step_overhead_s=median([_overhead(row) for row in rows])
    )
    return FleetCalibration(costs=costs, sample_error=pace.error, step_error=step_error)


def _trainer(run: MeasuredRun, prompt_tokens: int, gpus: int) -> tuple[TrainerCosts, float]:
    steps = run.steps[SKIPPED_STEPS:]
    prompts = run.config["rollout-batch-size"] * run.config["n-samples-per-prompt"] * prompt_tokens
    tokens = np.array([float(step.tokens + prompts) for step in steps])
    seconds = np.array([step.stop_s - step.start_s for step in steps])
    columns = np.stack([np.ones(len(steps)), tokens], axis=1)
    found = not_negative(columns, seconds)
    error = float(np.mean(np.abs(columns @ found - seconds)) / np.mean(seconds))
    rate = 1 / max(float(found[1]), _TINY) / gpus
    return TrainerCosts(fixed_s=float(found[0]), tokens_per_s_per_gpu=rate), error


def _overhead(row: Mapping[str, float]) -> float:
    """Seconds of a step spent neither waiting, training, nor on the copy of the weights."""
    spent = sum(row.get(f"time/{name}", 0.0) for name in ("trainer_waited_s", "train_s", "update_wait_s"))
    return max(0.0, row["time/step_s"] - spent)
