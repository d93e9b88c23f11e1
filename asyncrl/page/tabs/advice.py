"""The tab *Advice*: what the simulator, calibrated on this run, says about other settings."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.metrics.words import duration, percent
from asyncrl.page.advising.advice import Advice, Replay, Simulated
from asyncrl.page.advising.job import Job
from asyncrl.page.runs.run_files import RunFiles
from asyncrl.page.spans.recording import timelines_in
from asyncrl.page.tabs.tab import PageRequest, Views

_GOOD, _ROUGH = 0.1, 0.25
"""Largest errors of the replay at which the advice is trusted, and at which it is a hint."""
_MISSING = (
    "This run has no timeline, from which the simulator learns how long samples and steps take. "
    "It was started with --no-timeline, or timeline.json is not in its folder."
)
COLUMNS: Sequence[tuple[str, str]] = (
    ("S", "--max-staleness"),
    ("k", "--update-weights-interval"),
    ("N", "--sglang-server-concurrency"),
    ("GPUs", "for rollout + for the trainer"),
    ("trained tokens/s", ""),
    ("compared with now", ""),
    ("seconds per step", ""),
    ("trainer waits", "share of the time"),
    ("slots filled", "share of the slots"),
    ("lag", "mean / largest"),
)


def show(request: PageRequest) -> Mapping[str, Any]:
    """Return the values of the template, and start a study if the button was pressed."""
    job = job_of(request.run)
    files = timelines_in(request.run.path)
    asked = request.query.get("asked", "")
    if files and _is_new(asked, job):
        job.start(files[0], request.run.settings(), len(request.run.rows.steps()))
    return {
        "problem": "" if files else _MISSING,
        "progress": job.progress,
        "advice": _said(job.advice, request.run) if job.advice else None,
        "columns": COLUMNS,
        "now_s": f"{time.time():.0f}",
    }


def state(request: PageRequest) -> Mapping[str, Any]:
    """Return whether a study runs, with its progress in words."""
    progress = job_of(request.run).progress
    return {"is_running": progress.is_running, "text": progress.text}


def job_of(run: RunFiles) -> Job:
    """Return the studies of a run."""
    if "advice" not in run.parts:
        run.parts["advice"] = Job(run.path)
    job: Job = run.parts["advice"]
    return job


def _is_new(asked: str, job: Job) -> bool:
    """Return whether a press of the button has had no answer yet.

    ``asked`` is the time at which the page with the button was made, so loading its address again starts nothing.
    """
    if not asked.isdecimal() or int(asked) <= job.answered:
        return False
    return time.time() - int(asked) < _BUTTON_S


_BUTTON_S = 24 * 3600
"""Seconds for which the button of a page works."""


def _said(advice: Advice, run: RunFiles) -> Mapping[str, Any]:
    replay, steps = advice.replay, run.rows.steps()
    newer = len(steps) - advice.num_steps
    return {
        "trust": trust(replay.error),
        "grade": _grade(replay.error),
        "facts": list(_facts(replay)),
        "lines": [line[:1].upper() + line[1:] + "." for line in advice.lines],
        "rows": [_cells(row) for row in (advice.now, *advice.rows)],
        "split": advice.split,
        "age": f"Computed after {advice.num_steps:,} steps in {duration(advice.seconds)} minutes"
        + (f"; the run has {newer:,} more steps by now." if newer > 0 else "."),
    }


def _grade(error: float) -> str:
    return "good" if abs(error) <= _GOOD else "rough" if abs(error) <= _ROUGH else "bad"


def trust(error: float) -> str:
    """Return how far a model with this error of the replay can be trusted, in words."""
    off = f"{percent(abs(error))} {'longer' if error > 0 else 'shorter'} than they were"
    seen = f"Replayed with its own settings, the steps of this run are {off}"
    return {
        "good": f"{seen}: the simulator describes this run well.",
        "rough": f"{seen}: take the advice as a hint, and only its large gains.",
        "bad": f"{seen}: the simulator does not describe this run, and its advice is worth little.",
    }[_grade(error)]


def _facts(replay: Replay) -> list[tuple[str, str]]:
    prompt = f"{replay.prompt_tokens} tokens"
    return [
        ("Measured", f"{replay.measured_s:.3f} s per step"),
        ("Simulated", f"{replay.simulated_s:.3f} s per step"),
        ("Medians", f"{replay.measured_median_s:.3f} s, {replay.simulated_median_s:.3f} s"),
        ("Compared", f"{replay.num_steps} of the newest {replay.stretch} steps"),
        ("Error for a sample", percent(replay.sample_error)),
        ("Error for training", percent(replay.step_error)),
        ("Mean prompt", prompt if replay.is_prompt_measured else f"{prompt} (assumed: there is no rollouts/)"),
    ]


def _cells(row: Simulated) -> tuple[str, ...]:
    return (
        row.name,
        str(row.staleness),
        str(row.interval),
        str(row.slots),
        f"{row.rollout_gpus} + {row.trainer_gpus}",
        f"{row.trained_per_s:,.0f}",
        f"{row.times_now - 1:+.0%}",
        f"{row.step_s:.3g}",
        percent(row.trainer_idle),
        percent(row.slots_filled),
        f"{row.lag_mean:.2f} / {row.lag_max}",
    )


VIEWS = Views(show=show, data={"state": state})
