"""The adapter for slime's corrections of off-policy losses."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.compat.slime_types import SlimeArgs

if TYPE_CHECKING:  # imports torch, which a run without such a function does not need
    from asyncrl.algorithms.custom_functions import TisFn


def tis_from_slime(function: Callable[..., Any], args: SlimeArgs) -> "TisFn":
    """Adapt ``fn(args, *, pg_loss, train_log_probs, ...) -> (pg_loss, loss_masks, metrics)`` to a TisFn.

    The function receives whole answers on every rank, also with context parallelism.
    """

    @functools.wraps(function)
    def correct(
        losses: Any,
        logprobs: Any,
        behaviour: Any,
        mask: Any,
        lengths: Sequence[int],
        totals: Sequence[int],
        /,
    ) -> Any:
        sizes = list(lengths)
        return function(
            args,
            pg_loss=losses,
            train_log_probs=list(logprobs.split(sizes)),
            rollout_log_probs=list(behaviour.split(sizes)),
            loss_masks=list(mask.int().split(sizes)),
            total_lengths=list(totals),
            response_lengths=sizes,
        )

    return correct
