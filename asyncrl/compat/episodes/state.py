"""The state of slime's samples as plain values, which travel to the controller and back."""

import enum
import logging
from collections.abc import Mapping
from typing import Any

from asyncrl.compat.slime_sample import Sample, SlimeStatus
from asyncrl.errors import EpisodeFailed

logger = logging.getLogger(__name__)

_DROPPED: set[str] = set()
"""Attributes that were left out and named in the log, in this process."""
_MISSING = object()


def state_of(sample: Any) -> dict[str, Any]:
    """Return the attributes of a sample as JSON has them, with tuples and arrays as lists.

    An attribute that holds anything else is left out, and named in the log once.
    """
    if not isinstance(sample, Sample):
        raise EpisodeFailed(f"the function returned a {type(sample).__name__}; return the Sample, or a list of Samples")
    found = {}
    for name, value in sample.to_dict().items():
        plain = _plain(value)
        if plain is not _MISSING:
            found[name] = plain
        elif name not in _DROPPED:
            _DROPPED.add(name)
            kind = type(value).__name__
            logger.warning("sample.%s holds a %s, which stays in the process of user code", name, kind)
    return found


def status_of(state: Mapping[str, Any]) -> SlimeStatus:
    """Return the status, which user code may have written as text; PENDING if it is none of slime's."""
    try:
        return SlimeStatus(state.get("status"))
    except ValueError:
        return SlimeStatus.PENDING


def _plain(value: Any) -> Any:
    """Return the value as JSON has it, or _MISSING."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, bool | int | float | str):  # a subclass, as numpy's float64
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        entries = {str(name): _plain(each) for name, each in value.items()}
        return {name: each for name, each in entries.items() if each is not _MISSING}
    if isinstance(value, list | tuple | set | frozenset):
        return _plain_list(value)
    return _MISSING


def _plain_list(values: Any) -> Any:
    if all(type(each) is int for each in values) or all(type(each) is float for each in values):
        return list(values)  # token ids and log-probs: thousands
    entries = [_plain(each) for each in values]
    return _MISSING if any(each is _MISSING for each in entries) else entries
