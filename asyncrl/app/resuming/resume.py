"""The start of a run: new, or resumed from a checkpoint, which is checked before anything expensive starts."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from asyncrl.app.resuming.binding import binding
from asyncrl.config import RunConfig
from asyncrl.config.derived import has_critic
from asyncrl.config.resolved import changes, kept
from asyncrl.data.streaming.stream import PromptStream
from asyncrl.engines.megatron.checkpoint.directory import (
    TRACKER,
    Origin,
    check_model,
    check_save,
    complete_steps,
    find_origin,
    read_notes,
)
from asyncrl.errors import ConfigError
from asyncrl.hooks.prompt_source import FLAG, UserPrompts
from asyncrl.models.overrides import overridden
from asyncrl.models.shape import ModelShape, read_shape
from asyncrl.pipeline.recovery import JOURNAL_FOLDER, Recovery, prompts_at, recovery, unused_line
from asyncrl.pipeline.scheduling.run_state import Restored, RunState
from asyncrl.protocols import PromptSource
from asyncrl.types import Prompt, Weights

logger = logging.getLogger(__name__)


class ResumablePrompts(PromptSource, Protocol):
    """A source of prompts from which another run can resume."""

    @property
    def fingerprint(self) -> str:
        """A digest of the prompts and their order; positions are comparable only if it is equal."""

    def __len__(self) -> int:
        """Return a number that is equal for equal prompts."""

    def seek(self, position: int) -> None:
        """Continue with the prompt at ``position``, counted from 0 over all epochs."""

    def at(self, epoch: int, row: int) -> Prompt:
        """Return the prompt of a row.  Raises KeyError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a run: its first weights, its prompts and its counters."""

    origin: Origin | None = None
    """Origin of the first weights; None means ``--hf-checkpoint``."""
    before: RunState | None = None
    """State of the run that this one resumes; None for a new run."""
    again: tuple[Prompt, ...] = ()
    """Outstanding prompts of the resumed run, which start again."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Notes for this run's checkpoints: its prompts, its settings and a critic; empty if it writes none."""
    changes: tuple[str, ...] = ()
    """Lines for the user: the settings that differ from the resumed run's, and what its journal kept."""
    restored: Restored | None = None
    """The groups that the journal of the resumed run kept; None without a journal."""
    journal_notes: Mapping[str, Any] | None = None
    """Notes for this run's journal, by which a recovery recognizes it; None if it writes none."""

    @property
    def step(self) -> int:
        """Training steps done before this run."""
        return self.before.step if self.before else 0

    @property
    def weights(self) -> Weights:
        """Version and step of the first weights to publish; versions continue those of the resumed run."""
        return Weights(version=self.before.version + 1, step=self.before.step) if self.before else START


START = Weights(version=0, step=0)
"""Version and step of a new run's first weights."""


def find_start(run: RunConfig, prompts: ResumablePrompts, shape: ModelShape) -> Start:
    """Find the start of ``run``, whose model has ``shape``, and move ``prompts`` there.  Raises ConfigError."""
    check_save(run.checkpoint)
    start = _found(run, prompts, shape)
    if run.checkpoint.journal:
        start = _with_journal(run, prompts, start)
    if run.checkpoint.save is None:
        return start
    return replace(start, about={**about(prompts), "critic": has_critic(run.train), "settings": kept(run)})


def _found(run: RunConfig, prompts: ResumablePrompts, shape: ModelShape) -> Start:
    if run.debug.debug_rollout_only:  # the engines read hf-checkpoint, and get no other weights
        return Start()
    origin = find_origin(run.checkpoint, run.train.ref_load)
    if origin is None:
        return Start(changes=_passed_over(run.checkpoint.load))
    notes = _checked_notes(run, origin, shape)
    if origin.kind != "resume":
        logger.info("starting from the weights of %s", origin.folder)
        return Start(origin=origin, changes=_passed_over(run.checkpoint.load))
    if notes is None:
        raise ConfigError(
            f"load {origin.folder} has no run.json, so its run cannot be resumed; --ref-load takes its weights alone"
        )
    if has_critic(run.train) and notes["run"].get("critic") is False:
        raise ConfigError(
            f"advantage-estimator ppo: {origin.folder} has no critic; --ref-load takes its weights alone, for a new run"
        )
    start = _resumed(origin, notes["run"], prompts)
    if start.step >= run.rollout.num_rollout:
        raise ConfigError(
            f"num-rollout {run.rollout.num_rollout}: the checkpoint {origin.folder} has done {start.step} steps; "
            "num-rollout counts those; if the final weights are missing: python -m "
            f"asyncrl.engines.megatron.weights.convert to-hf {origin.folder.parent} TARGET --hf-checkpoint "
            f"{run.model.hf_checkpoint}"
        )
    logger.info("resuming from %s, step %d", origin.folder, start.step)
    return replace(start, changes=_changes(notes["run"].get("settings"), run))


def _passed_over(load: Path | None) -> tuple[str, ...]:
    """One line if a new run starts although ``load`` has checkpoints, because no file names the newest."""
    steps = [] if load is None or (load / TRACKER).exists() else complete_steps(load)
    if not steps:
        return ()
    return (
        f"load {load} has a checkpoint of step {steps[-1]}, which is not used: {TRACKER} is missing; to resume from "
        f"it, give ckpt-step {steps[-1]}",
    )


def _with_journal(run: RunConfig, prompts: ResumablePrompts, start: Start) -> Start:
    """Return ``start`` with what the journal in ``--load`` kept since, and with notes for this run's journal."""
    notes = {**about(prompts), **binding(run)}
    start = replace(start, journal_notes=notes if run.checkpoint.save is not None else None)
    if (load := run.checkpoint.load) is None:
        return start
    folder = load / JOURNAL_FOLDER
    if run.checkpoint.ckpt_step is not None:  # who goes back to an earlier step wants other groups
        lines = (unused_line(folder, "ckpt-step is given"),) if folder.is_dir() else ()
        return replace(start, changes=(*start.changes, *lines))
    found = recovery(
        folder,
        start.before,
        notes,
        prompts.at,
        num_steps=run.rollout.num_rollout,
        takes_back=isinstance(prompts, UserPrompts) and prompts.takes_back,
        continues=not run.episodes.has_episodes,
    )
    if not isinstance(found, Recovery):
        return start if found is None else replace(start, changes=(*start.changes, found))
    logger.info("%s", found.words)
    if isinstance(prompts, UserPrompts):  # a source has only the states of checkpoints
        prompts.leave_out(found.given, found.next_row)
    else:
        _move(prompts, found.before)
    return replace(
        start,
        before=found.before,
        again=found.again,
        restored=found.restored,
        changes=(*start.changes, found.words),
    )


def _changes(before: Any, run: RunConfig) -> tuple[str, ...]:
    """Describe how ``run`` differs from the checkpoint's settings, which earlier versions did not keep."""
    if not isinstance(before, Mapping):
        return ("the checkpoint has no settings to compare with: an earlier version of asyncrl wrote it",)
    return changes({str(name): str(value) for name, value in before.items()}, run)


def about(prompts: ResumablePrompts) -> dict[str, Any]:
    """Return a checkpoint's notes about the prompts, by which a resumed run recognizes them."""
    return {"prompts": len(prompts), "fingerprint": prompts.fingerprint}


def _checked_notes(run: RunConfig, origin: Origin, shape: ModelShape) -> dict[str, Any] | None:
    """Return the notes of the checkpoint, or None if it has none.  Raises ConfigError if its model is another."""
    if origin.kind == "hugging_face":
        check_model(origin.folder, asdict(overridden(read_shape(origin.folder), run.shape)), shape)
        return None
    notes = read_notes(origin.folder)
    if notes is not None:
        check_model(origin.folder, notes["model"], shape)
    return notes


def _resumed(origin: Origin, saved: Mapping[str, Any], prompts: ResumablePrompts) -> Start:
    ours = about(prompts)
    known = {name: saved.get(name) for name in ours}
    if known != ours and FLAG in f"{known['fingerprint']} {ours['fingerprint']}":
        raise ConfigError(
            f"{FLAG}: {origin.folder} was made with another source of prompts; give the same path, or take its weights "
            "alone with --ref-load"
        )
    if known != ours:
        raise ConfigError(
            f"prompt-data: {origin.folder} was made with other prompts ({known['prompts']} of them, here "
            f"{len(prompts)}), or in another order; --ref-load takes its weights alone"
        )
    try:
        before = RunState.from_json(saved["state"])
        again = before.prompts or prompts_at(before.outstanding, prompts.at)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{origin.folder}: {error}") from error
    _move(prompts, before)
    return Start(
        origin=replace(origin, optimizer=origin.optimizer and bool(saved.get("optimizer"))), before=before, again=again
    )


def _move(prompts: ResumablePrompts, before: RunState) -> None:
    """Continue behind the prompts that the resumed run has taken.  Raises ConfigError."""
    if isinstance(prompts, UserPrompts):
        source = before.source or {"fetched": before.prompts_taken, "state": None}
        prompts.restore(before.step, source["fetched"], source["state"])
        prompts.leave_out(before.given)
        return
    if not isinstance(prompts, PromptStream) or before.last_taken is None:
        prompts.seek(before.prompts_taken)
        return
    try:
        prompts.resume_after(*before.last_taken)
    except KeyError as error:
        raise ConfigError(
            f"prompt-data: the files have no row {error}, with which the checkpoint's run ended"
        ) from error
