"""The adapters for slime's log functions."""

import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from asyncrl.compat.slime_sample import Sample
from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.compat.slime_views import group_to_slime, to_slime
from asyncrl.errors import name_of
from asyncrl.hooks.log_hooks import RowChanges
from asyncrl.protocols import EvalLogFn, RolloutLogFn
from asyncrl.types import Batch, EvalReport, Prompt, ScoredSample

logger = logging.getLogger(__name__)

Row = Mapping[str, float | int]
_PLACES = ("step", "eval/step")
"""Entries that say to which step a row belongs; they stay as they are."""


def rollout_log_from_slime(function: Callable[..., Any], args: SlimeArgs) -> RolloutLogFn:
    """Adapt ``fn(rollout_id, args, samples, extra_metrics, rollout_time) -> bool``.

    ``extra_metrics`` is the row of the step, ``rollout_time`` the seconds of the step.  The row is always written, with
    what the function wrote into ``extra_metrics`` unless it returns True.
    """
    told = _Extra(function)

    def log(step: int, batch: Batch, row: Row, /) -> RowChanges | None:
        samples = list(chain.from_iterable(group_to_slime(group) for group in batch.groups))
        extra: dict[str, Any] = dict(row)
        has_logged = function(step, args, samples, extra, row.get("time/step_s", 0.0))
        return None if has_logged else told.changes(row, extra)

    log.__name__ = name_of(function)
    return log


def eval_log_from_slime(function: Callable[..., Any], args: SlimeArgs) -> EvalLogFn:
    """Adapt ``fn(rollout_id, args, data, extra_metrics) -> bool``.

    ``data`` has ``rewards``, ``truncated`` and ``samples`` of each data set, or what a user's evaluation function
    returned.  ``rollout_id`` is the step that trained the evaluated weights, 0 before training.  What the function
    writes into ``extra_metrics`` becomes part of the row unless it returns True.
    """
    told = _Extra(function)

    def log(step: int, report: EvalReport, row: Row, /) -> RowChanges | None:
        data = {name: dict(columns) for name, columns in report.columns.items()}
        data |= {name: _columns(answers) for name, answers in report.answers.items()}
        extra: dict[str, Any] = {name: value for name, value in row.items() if name.startswith("eval/")}
        has_logged = function(max(0, step - 1), args, data, extra)
        return None if has_logged else told.changes(row, extra)

    log.__name__ = name_of(function)
    return log


class _Extra:
    """Reads what a function wrote into its ``extra_metrics``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = name_of(function)
        self._told = set[str]()

    def changes(self, row: Row, extra: Mapping[Any, Any]) -> RowChanges | None:
        """Return the finite numbers that differ from those of ``row``, if any.

        Other values are named in the log, once.
        """
        found = RowChanges()
        for name, value in extra.items():
            if name in row and (value is row[name] or name in _PLACES):
                continue
            number = _number(value)
            if isinstance(name, str) and number is not None:
                found[name] = number
            elif str(name) not in self._told:
                self._told.add(str(name))
                logger.warning(
                    "log function %s: extra_metrics[%r] is no finite number but %.80r; it is not written",
                    self._name,
                    name,
                    value,
                )
        return found or None


def _number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    plain = value.item() if getattr(value, "ndim", None) == 0 else value  # of torch or numpy
    return float(plain) if isinstance(plain, numbers.Real) and math.isfinite(plain) else None


def _columns(answers: Sequence[tuple[Prompt, ScoredSample]]) -> dict[str, list[Any]]:
    samples = [
        to_slime(prompt, scored.sample, scored.reward, scored.loss_mask, scored.reward_parts)
        for prompt, scored in answers
    ]
    for index, sample in enumerate(samples):
        sample.index = index
    return {
        "rewards": [scored.reward for _, scored in answers],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }
