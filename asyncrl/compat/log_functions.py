"""The adapters for slime's log functions."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from asyncrl.compat.slime_sample import Sample
from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.compat.slime_views import group_to_slime, to_slime
from asyncrl.errors import name_of
from asyncrl.protocols import EvalLogFn, RolloutLogFn
from asyncrl.types import Batch, EvalReport, Prompt, ScoredSample

Row = Mapping[str, float | int]


def rollout_log_from_slime(function: Callable[..., Any], args: SlimeArgs) -> RolloutLogFn:
    """Adapt ``fn(rollout_id, args, samples, extra_metrics, rollout_time) -> bool``.

    ``extra_metrics`` is the row of the step, ``rollout_time`` the seconds of the step.  The result is ignored, because
    the row is always written.
    """

    def log(step: int, batch: Batch, row: Row, /) -> None:
        samples = list(chain.from_iterable(group_to_slime(group) for group in batch.groups))
        function(step, args, samples, dict(row), row.get("time/step_s", 0.0))

    log.__name__ = name_of(function)
    return log


def eval_log_from_slime(function: Callable[..., Any], args: SlimeArgs) -> EvalLogFn:
    """Adapt ``fn(rollout_id, args, data, extra_metrics) -> bool``.

    ``data`` has ``rewards``, ``truncated`` and ``samples`` of each data set, or what a user's evaluation function
    returned.  ``rollout_id`` is the step that trained the evaluated weights, 0 before training.
    """

    def log(step: int, report: EvalReport, row: Row, /) -> None:
        data = {name: dict(columns) for name, columns in report.columns.items()}
        data |= {name: _columns(answers) for name, answers in report.answers.items()}
        extra = {name: value for name, value in row.items() if name.startswith("eval/")}
        function(max(0, step - 1), args, data, extra)

    log.__name__ = name_of(function)
    return log


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
