"""The conversion of a returned value to a reward: a number, or one entry of a dict."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import RewardFailed, RewardKeyMissing
from asyncrl.types import Reward, is_usable


def reward_of(value: Any, key: str | None) -> Reward:
    """Return the reward that a function returned; ``key`` selects the entry of a dict.

    Raises RewardFailed if the value is neither a number nor a dict with a number at ``key``: RewardKeyMissing for a
    dict without a ``key``.
    """
    if isinstance(value, Reward):
        return value
    if not isinstance(value, Mapping):
        return Reward(value=number_of(value, "a reward"))
    entries = ", ".join(str(name) for name in value) or "no entries"
    if key is None:
        raise RewardKeyMissing(f"a dict reward with {entries}: name one of them with --reward-key or --eval-reward-key")
    if key not in value:
        raise RewardFailed(f"the dict reward has no entry {key!r} (--reward-key); it has: {entries}")
    parts = {str(name): _plain(entry) for name, entry in value.items()}
    return Reward(value=number_of(value[key], f"the entry {key!r} of a dict reward"), parts=parts)


def rewards_of(values: Any, key: str | None) -> list[Reward]:
    """Return the rewards of a list.  Raises RewardFailed."""
    values = _plain(values)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardFailed(f"a list of rewards is needed, got a {type(values).__name__}: {values!r}")
    return [reward_of(value, key) for value in values]


def number_of(value: Any, name: str) -> float:
    """Return the one usable number that ``value`` is.  Raises RewardFailed, with the ``name`` of the value."""
    plain = _plain(value)
    while isinstance(plain, list) and len(plain) == 1:  # a tensor with one element
        plain = plain[0]
    if is_usable(plain):
        return float(plain)
    if isinstance(plain, numbers.Real):
        raise RewardFailed(f"{name} must be one number from -1e15 to 1e15, got {value!r:.80}")
    raise RewardFailed(f"{name} must be one number, got a {type(value).__name__}: {value!r}")


def _plain(value: Any) -> Any:
    """Return a number or an array of numpy or torch as Python's; anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value
