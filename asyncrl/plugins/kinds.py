"""What a plug-in of each flag must look like."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.compat import SlimeArgs, filter_from_slime, pick_from_slime, reward_from_slime
from asyncrl.plugins.picks import checked_pick
from asyncrl.protocols import KeepFn, PickFn, RewardFn


def _as_it_is[F](function: F) -> F:
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind[F]:
    """What a plug-in of one flag must look like."""

    flag: str
    is_async: bool
    parameters: tuple[str, ...]
    slime_parameters: tuple[str, ...]
    """slime's shape has ``args`` as its first parameter, ours never."""
    from_slime: Callable[[Callable[..., Any], SlimeArgs], F]
    guarded: Callable[[F], F] = _as_it_is
    """Checks what the function returns, where the stage that calls it does not."""


REWARD: Kind[RewardFn] = Kind(
    flag="--custom-rm-path",
    is_async=True,
    parameters=("prompt", "sample"),
    slime_parameters=("args", "sample"),
    from_slime=reward_from_slime,
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
