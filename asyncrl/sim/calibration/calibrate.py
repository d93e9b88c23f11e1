"""The calibration of the model on a short real run: ordinary least squares over its samples and steps.

A sample of L tokens with b other requests around it, and n requests that start meanwhile, takes about

    latency + (fixed · L + per_request · L · b + prompt / prefill_rate · n) · (1 + (e - 1) · share of it in training)

seconds, pauses excluded.  A step takes (fixed + tokens / rate) · (1 + (t - 1) · share of it with samples in flight).
The slowdowns e and t apply where engine and trainer share processors; they are scanned.  All else is linear given them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncrl.errors import DataError
from asyncrl.metrics.intervals import union
from asyncrl.sim.calibration.measured import MeasuredRun, read_run
from asyncrl.sim.calibration.squares import Floats, not_negative
from asyncrl.sim.calibration.tables import as_toml

SKIPPED_STEPS = 3
"""Steps ignored at the start, where kernels are compiled and caches are cold."""
_SLOWDOWNS = np.arange(1.0, 3.01, 0.05)
"""The slowdowns to scan.  Two processes on one core would slow each other down by 2."""
_VARIED = 0.05
"""Standard deviation of a share below which a slowdown looks the same as a slower machine and is left out."""
_ROUNDS = 6
"""Rounds of averaging and fitting; the coefficients then change by less than 1 %."""
_PLENTY = 10**9
"""The value of limits that the fit leaves unlimited."""
_TINY = 1e-9
"""Seconds per token below which a rate counts as unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted costs, in seconds."""

    latency_s: float
    fixed_s: float
    per_request_s: float
    prefill_s: float
    """Seconds per prompt token."""
    engine_slowdown: float
    train_fixed_s: float
    train_token_s: float
    trainer_slowdown: float
    pause_s: float
    step_overhead_s: float
    kv_tokens: int
    sample_error: float
    """Mean absolute residual of a sample's time, as a share of the mean time."""
    step_error: float
    """Mean absolute residual of a training step's time, as a share of the mean time."""

    def tables(self) -> dict[str, dict[str, float]]:
        """The tables of a calibration file."""
        return {
            "engine": {
                "latency_s": self.latency_s,
                "fixed_s": self.fixed_s,
                "per_request_s": self.per_request_s,
                "per_context_token_s": 0.0,
                "prefill_tokens_per_s": 1 / max(self.prefill_s, _TINY),
                "kv_tokens": self.kv_tokens,
                "max_running": _PLENTY,
            },
            "trainer": {"fixed_s": self.train_fixed_s, "tokens_per_s_per_gpu": 1 / max(self.train_token_s, _TINY)},
            "update": {"pause_s": self.pause_s},
            "sharing": {"engine": self.engine_slowdown, "trainer": self.trainer_slowdown},
            "controller": {"step_overhead_s": self.step_overhead_s},
        }

    def toml(self) -> str:
        """The text of a calibration file, for ``--calibration``."""
        return as_toml(
            f"Mean absolute residual: {self.sample_error:.1%} of a sample's time, "
            f"{self.step_error:.1%} of a training step's.",
            self.tables(),
        )


def calibrate(run_dir: Path, prompt_tokens: int) -> Calibration:
    """Fit to the run in ``run_dir``, whose prompts have ``prompt_tokens`` tokens on average.  Raises DataError."""
    run = read_run(run_dir)
    if len(run.steps) < SKIPPED_STEPS + 4:
        raise DataError(f"{run_dir}: {len(run.steps)} steps, at least {SKIPPED_STEPS + 4} are needed to calibrate")
    return fit(run, prompt_tokens)


def fit(run: MeasuredRun, prompt_tokens: int) -> Calibration:
    """Fit to a run that has been read."""
    engine, engine_slowdown, sample_error = _fit_engine(run, prompt_tokens)
    trainer, trainer_slowdown, step_error = _fit_trainer(run, prompt_tokens)
    rows = run.rows[SKIPPED_STEPS:]
    return Calibration(
        latency_s=float(engine[0]),
        fixed_s=float(engine[1]),
        per_request_s=float(engine[2]),
        prefill_s=float(engine[3]),
        engine_slowdown=engine_slowdown,
        train_fixed_s=float(trainer[0]),
        train_token_s=float(trainer[1]),
        trainer_slowdown=trainer_slowdown,
        pause_s=_mean([stop - start for start, stop in run.updates[SKIPPED_STEPS:]]),
        step_overhead_s=float(np.median([_overhead(row) for row in rows])),  # the mean would count evaluations
        kv_tokens=int(run.config.get("sglang-max-total-tokens", _PLENTY)),
        sample_error=sample_error,
        step_error=step_error,
    )


def _fit_engine(run: MeasuredRun, prompt_tokens: int) -> tuple[Floats, float, float]:
    """(latency, fixed, per request, per prompt token), slowdown, error.

    A sample's surroundings are averaged over its tokens, not over its time.  Tokens come faster where fewer requests
    share the engine, and that rate is what the fit looks for.  So the averages start from equal speed and are computed
    again in each round.
    """
    settled = run.steps[SKIPPED_STEPS - 1].stop_s
    samples = [sample for sample in run.samples if sample.start_s >= settled]
    starts, stops = (np.array([getattr(each, name) for each in samples]) for name in ("start_s", "stop_s"))
    tokens = np.array([float(each.tokens) for each in samples])
    begun = np.sort(np.array([sample.start_s for sample in run.samples]))
    arrivals = (np.searchsorted(begun, stops) - np.searchsorted(begun, starts)) * float(prompt_tokens)
    seconds = stops - starts - _overlap(starts, stops, run.updates)
    found, slowdown, error = np.array([0.0, 1.0, 0.0, 0.0]), 1.0, 0.0
    for _ in range(_ROUNDS):
        first = np.minimum(starts + found[0], stops)
        train, around, both = _Company.of(run, found, slowdown).means(first, stops)
        alone = np.ones((len(samples), 1))
        work = np.stack([tokens, tokens * around, arrivals], axis=1)
        shared = np.stack([tokens * train, tokens * both, arrivals * train], axis=1)
        found, slowdown, error = _scan(alone, work, shared, seconds)
    return found, slowdown, error


@dataclass(frozen=True, slots=True)
class _Company:
    """Decoding speed and number of requests at each moment of a run, by an earlier estimate."""

    edges: Floats
    areas: Floats
    """Integrals up to each edge of speed, speed · training, speed · requests, and speed · training · requests."""

    @staticmethod
    def of(run: MeasuredRun, found: Floats, slowdown: float) -> "_Company":
        """The company in ``run``; ``found`` as returned by ``_fit_engine``."""
        spans = [(min(each.start_s + found[0], each.stop_s), each.stop_s) for each in run.samples]
        training = [(step.start_s, step.stop_s) for step in run.steps]
        edges = np.unique(np.array([*spans, *training, *run.updates]).ravel())
        requests, train, paused = (_open(edges, kind) for kind in (spans, training, run.updates))
        step_s = (found[1] + found[2] * requests) * (1 + (slowdown - 1) * train)
        speed = np.where(paused > 0, 0.0, 1 / np.maximum(step_s, _TINY))
        rates = np.stack([speed, speed * train, speed * requests, speed * train * requests])
        areas = np.concatenate([np.zeros((4, 1)), np.cumsum(rates[:, :-1] * np.diff(edges), axis=1)], axis=1)
        return _Company(edges, areas)

    def means(self, starts: Floats, stops: Floats) -> tuple[Floats, Floats, Floats]:
        """Per token between each start and stop: share in training, requests, and requests in training."""
        parts = [np.interp(stops, self.edges, area) - np.interp(starts, self.edges, area) for area in self.areas]
        speed = np.maximum(parts[0], _TINY)
        return parts[1] / speed, parts[2] / speed, parts[3] / speed


def _open(edges: Floats, spans: Sequence[tuple[float, float]]) -> Floats:
    """The number of ``spans`` that are open after each edge."""
    starts, stops = np.sort(np.array([start for start, _ in spans])), np.sort(np.array([stop for _, stop in spans]))
    count: Floats = (np.searchsorted(starts, edges, "right") - np.searchsorted(stops, edges, "right")).astype(float)
    return count


def _fit_trainer(run: MeasuredRun, prompt_tokens: int) -> tuple[Floats, float, float]:
    """(fixed, per token), slowdown, error."""
    steps = run.steps[SKIPPED_STEPS:]
    starts, stops = (np.array([getattr(each, name) for each in steps]) for name in ("start_s", "stop_s"))
    per_step = run.config["rollout-batch-size"] * run.config["n-samples-per-prompt"]
    tokens = np.array([float(each.tokens + prompt_tokens * per_step) for each in steps])
    busy = union([(each.start_s, each.stop_s) for each in run.samples])
    shared = _overlap(starts, stops, busy) / (stops - starts)
    work = np.stack([np.ones(len(steps)), tokens], axis=1)
    return _scan(np.empty((len(steps), 0)), work, work * shared[:, None], stops - starts)


def _scan(alone: Floats, work: Floats, shared: Floats, seconds: Floats) -> tuple[Floats, float, float]:
    """Coefficients, slowdown and relative error; ``shared`` is the part of ``work`` that was slowed down."""
    varied = np.std(shared[:, 0] / np.maximum(work[:, 0], _TINY)) >= _VARIED
    best: tuple[float, Floats, float, Floats] | None = None
    for slowdown in _SLOWDOWNS if varied else [1.0]:
        columns = np.concatenate([alone, work + (slowdown - 1) * shared], axis=1)
        coefficients = not_negative(columns, seconds)
        residuals = columns @ coefficients - seconds
        squares = float(residuals @ residuals)
        if best is None or squares < best[0]:
            best = squares, coefficients, float(slowdown), residuals
    if best is None:
        raise AssertionError("there is at least one slowdown to try")
    return best[1], best[2], float(np.mean(np.abs(best[3])) / np.mean(seconds))


def _overlap(starts: Floats, stops: Floats, spans: Sequence[tuple[float, float]]) -> Floats:
    """Seconds of ``spans`` between each start and stop; where spans overlap each other, each one counts."""
    edges = sorted([(start, 1.0) for start, _ in spans] + [(stop, -1.0) for _, stop in spans])
    if not edges:
        return np.zeros(len(starts))
    at = np.array([edge for edge, _ in edges])
    open_spans = np.cumsum([change for _, change in edges])
    area = np.concatenate([[0.0], np.cumsum(np.diff(at) * open_spans[:-1])])
    overlap: Floats = np.interp(stops, at, area) - np.interp(starts, at, area)
    return overlap


def _overhead(row: dict[str, float]) -> float:
    """Seconds of a step spent neither waiting nor training, for example in the snapshot."""
    return max(0.0, row["time/step_s"] - row["time/trainer_waited_s"] - row["time/train_s"])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
