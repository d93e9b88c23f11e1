"""The required signature of the user function of each flag."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.compat import (
    SlimeArgs,
    advantage_from_slime,
    filter_from_slime,
    group_reward_from_slime,
    pick_from_slime,
    reward_from_slime,
    tis_from_slime,
)
from asyncrl.errors import PluginError
from asyncrl.plugins.buffer_filter_check import checked_pick
from asyncrl.protocols import KeepFn, PickFn

if TYPE_CHECKING:  # imports torch, which a run without such functions does not need here
    from asyncrl.algorithms.custom_functions import AdvantageFn, LossFn, TisFn


def _no_slime_loss(function: Callable[..., Any], args: SlimeArgs) -> Any:
    raise PluginError(
        "has slime's signature (args, batch, logits, sum_of_sample_mean), but logits of the whole vocabulary never "
        "exist here; write loss(logprobs, old_logprobs, advantages, mask, lengths), which returns a loss per token and "
        "a dict of metrics"
    )


def _tis_without_totals(function: Callable[..., Any]) -> "TisFn":
    """Adapt ``correct(losses, logprobs, behaviour, mask, lengths)``, which does not ask for lengths with prompts."""

    @functools.wraps(function)
    def correct(losses: Any, logprobs: Any, behaviour: Any, mask: Any, lengths: Any, totals: Any, /) -> Any:
        return function(losses, logprobs, behaviour, mask, lengths)

    return correct


def _as_it_is[F](function: F) -> F:
    return function


def _unguarded[F](function: F, label: str) -> F:
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind[F]:
    """The required signature of the user function of one flag."""

    flag: str
    is_async: bool | None
    """Whether the function is written with ``async def``; None if both may be."""
    parameters: tuple[str, ...]
    slime_parameters: tuple[str, ...]
    """Parameters of slime's signature; one is ``args``, which ours never has.

    Empty: slime's signature is not accepted, and ``from_slime`` raises the reason.
    """
    from_slime: Callable[[Callable[..., Any], SlimeArgs], F]
    slime_keywords: tuple[str, ...] = ()
    """Parameters that slime passes by keyword, after ``slime_parameters``."""
    from_native: Callable[[Any], F] = _as_it_is
    """Adapts a function of the native shape, if the stage calls another one."""
    guarded: Callable[[F, str], F] = _unguarded
    """Adds a check of the function's results, if the stage that calls it has none; gets the flag and the path."""


REWARD: Kind[Callable[..., Any]] = Kind(
    flag="--custom-rm-path",
    is_async=None,
    parameters=("prompt", "sample"),
    slime_parameters=("args", "sample"),
    from_slime=reward_from_slime,
)
GROUP_REWARD: Kind[Callable[..., Any]] = Kind(
    flag="--custom-rm-path",
    is_async=None,
    parameters=("prompt", "samples"),
    slime_parameters=("args", "samples"),
    from_slime=group_reward_from_slime,
)
KEEP: Kind[KeepFn] = Kind(
    flag="--dynamic-sampling-filter-path",
    is_async=False,
    parameters=("group",),
    slime_parameters=("args", "samples"),
    from_slime=filter_from_slime,
)
PICK: Kind[PickFn] = Kind(
    flag="--buffer-filter-path",
    is_async=False,
    parameters=("step", "waiting", "size"),
    slime_parameters=("args", "rollout_id", "buffer", "num_samples"),
    from_slime=pick_from_slime,
    guarded=checked_pick,
)
ADVANTAGE: "Kind[AdvantageFn]" = Kind(
    flag="--custom-advantage-function-path",
    is_async=False,
    parameters=("samples",),
    slime_parameters=("args", "rollout_data"),
    from_slime=advantage_from_slime,
)
LOSS: "Kind[LossFn]" = Kind(
    flag="--custom-loss-function-path",
    is_async=False,
    parameters=("logprobs", "old_logprobs", "advantages", "mask", "lengths"),
    slime_parameters=(),
    from_slime=_no_slime_loss,
)
TIS: "Kind[TisFn]" = Kind(
    flag="--custom-tis-function-path",
    is_async=False,
    parameters=("losses", "logprobs", "behaviour", "mask", "lengths"),
    slime_parameters=("args",),
    slime_keywords=(
        "pg_loss",
        "train_log_probs",
        "rollout_log_probs",
        "loss_masks",
        "total_lengths",
        "response_lengths",
    ),
    from_slime=tis_from_slime,
    from_native=_tis_without_totals,
)
