"""The tokens of a sample that a function of slime's shape returned, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.compat.episodes.state import status_of
from asyncrl.compat.slime_sample import SlimeStatus
from asyncrl.errors import EpisodeFailed
from asyncrl.rollouts.record import TokenIds, ids_of
from asyncrl.rollouts.session import EpisodeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedTokens:
    """Prompt and response of one sample; everything but ``tokens`` is about the response."""

    name: str
    """The episode and the place in its list, for error lines."""
    tokens: TokenIds
    prompt_length: int
    mask: bytes
    """A 0 or 1 for each response token."""
    logprobs: Sequence[Any] | None
    """The function's copies, unchecked; they may have None, and entries beyond a response that is cut."""
    status: SlimeStatus
    num_cut: int
    """Response tokens beyond the maximum context length, which are left out."""


def returned_tokens(name: str, state: Mapping[str, Any], limits: EpisodeLimits) -> ReturnedTokens:
    """Read the state of a sample.  Raises EpisodeFailed unless prompt, response, mask and log-probs fit together."""
    given, length = _list(name, state, "tokens") or [], _length(name, state)
    if len(given) <= length:
        raise EpisodeFailed(
            f"{name} has {len(given)} tokens, and a response_length of {length}; tokens hold prompt and response"
        )
    logprobs = _list(name, state, "rollout_log_probs")
    if logprobs is not None and len(logprobs) != length:
        raise EpisodeFailed(f"{name} has {len(logprobs)} rollout_log_probs, its response_length is {length}")
    prompt_length = len(given) - length
    kept = min(length, max(0, limits.max_context_len - prompt_length))
    return ReturnedTokens(
        name=name,
        tokens=_ids(name, given, limits.vocabulary_size)[: prompt_length + kept],
        prompt_length=prompt_length,
        mask=_mask(name, state, length)[:kept],
        logprobs=logprobs,
        status=status_of(state),
        num_cut=length - kept,
    )


def _length(name: str, state: Mapping[str, Any]) -> int:
    found = state.get("response_length") or 0
    if not isinstance(found, int) or found < 0:
        raise EpisodeFailed(f"{name} has a response_length of {found!r:.60}; it is a number of tokens")
    return found


def _list(name: str, state: Mapping[str, Any], key: str) -> Any:
    """Return the value of ``key``, which is a list or missing.  Raises EpisodeFailed."""
    found = state.get(key)
    if not (found is None or isinstance(found, list)):
        raise EpisodeFailed(f"{name} has {key} of the type {type(found).__name__}; it is a list")
    return found


def _ids(name: str, given: Sequence[Any], vocabulary_size: int) -> TokenIds:
    try:
        ids = ids_of(given)
    except (TypeError, OverflowError) as error:
        raise EpisodeFailed(f"{name} has tokens that are no token ids: {error}") from None
    found = np.frombuffer(ids, np.intc)
    wrong = found[(found < 0) | (found >= vocabulary_size)]
    if len(wrong):
        raise EpisodeFailed(f"{name} has the token {wrong[0]}; token ids are 0 to {vocabulary_size - 1}")
    return ids


def _mask(name: str, state: Mapping[str, Any], length: int) -> bytes:
    """Return the loss mask: ones without one, zeros for a sample that is removed."""
    given = _list(name, state, "loss_mask")
    if given is not None and len(given) != length:
        raise EpisodeFailed(f"{name} has a loss_mask of {len(given)} entries, its response_length is {length}")
    try:
        mask = b"\x01" * length if given is None else bytes(given)
    except (TypeError, ValueError):  # floats, or anything else
        mask = bytes(each if each in (0, 1) else 2 for each in map(_whole, given or ()))
    if mask.count(0) + mask.count(1) < length:
        raise EpisodeFailed(f"{name} has a loss_mask with other entries than 0 and 1")
    return bytes(length) if state.get("remove_sample") else mask


def _whole(entry: Any) -> Any:
    return int(entry) if isinstance(entry, float) and entry.is_integer() else entry
