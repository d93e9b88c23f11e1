"""The results of programs, in plain values and back.  The controller checks what it reads."""

import math
import numbers
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import orjson

from asyncrl.episodes import EpisodeEnd
from asyncrl.rollouts.interfaces import SlimeResult
from asyncrl.rollouts.session import Verdict
from asyncrl.types import Reward, SamplingParams, is_usable

_VERDICT, _SLIME, _OTHER = "verdict", "slime", "other"


def plain_result(result: Any) -> Any:
    """Return a result as a pair of its kind and its values, which may still have values without a plain type."""
    if isinstance(result, Verdict):
        return [_VERDICT, _plain_verdict(result)]
    if isinstance(result, SlimeResult):
        return [_SLIME, {"samples": [dict(each) for each in result.samples], "is_list": result.is_list}]
    return [_OTHER, result]


def _plain_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "rewards": {name: [reward.value, reward.parts] for name, reward in verdict.rewards.items()},
        "turn_rewards": verdict.turn_rewards,
        "left_out": verdict.left_out,
        "end": verdict.end,
        "metrics": verdict.metrics,
        "metadata": verdict.metadata,
    }


def result_of(value: Any) -> Verdict | SlimeResult:
    """Return the result of an episode.  Raises ValueError."""
    kind, found = value
    if kind == _VERDICT:
        return _verdict(found)
    if kind == _SLIME:
        return SlimeResult(samples=tuple(found["samples"]), is_list=bool(found["is_list"]))
    raise ValueError(f"a program returned a {type(found).__name__}, not a result")


def reward_value_of(value: Any) -> list[Reward]:
    """Return the rewards that a program of a reward returned.  Raises ValueError."""
    kind, found = value
    if kind != _OTHER or not isinstance(found, list):
        raise ValueError("a program of a reward returned no rewards")
    return [Reward(value=_number(number, "a reward"), parts=parts) for number, parts in found]


def plain_rewards(rewards: list[Reward]) -> list[Any]:
    """Return rewards as ``reward_value_of`` reads them."""
    return [[reward.value, dict(reward.parts)] for reward in rewards]


def _verdict(found: Mapping[str, Any]) -> Verdict:
    return Verdict(
        rewards={
            name: Reward(value=_finite(value, "the episode's reward"), parts=parts or {})
            for name, (value, parts) in found["rewards"].items()
        },
        turn_rewards={call: _finite(value, "a turn's reward") for call, value in found["turn_rewards"].items()},
        left_out=frozenset(found["left_out"]),
        end=None if found["end"] is None else EpisodeEnd(found["end"]),
        metrics={str(name): _finite(value, f"the metric {name}") for name, value in found["metrics"].items()},
        metadata=found["metadata"],
    )


def sampling_of(changes: Mapping[str, Any] | None, usual: SamplingParams) -> SamplingParams:
    """Return the settings of one turn.  Raises ValueError for a setting or value that there is none of."""
    if not changes:
        return usual
    names = {each.name for each in fields(SamplingParams)}
    if unknown := changes.keys() - names:
        raise ValueError(f"unknown sampling settings: {', '.join(sorted(unknown))}")
    converted = {name: _setting(name, value, getattr(usual, name)) for name, value in changes.items()}
    if converted.get("max_new_tokens", 1) < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {converted['max_new_tokens']}")
    return replace(usual, **converted)


def _setting(name: str, value: Any, usual: Any) -> Any:
    """Return a value of the type that the setting has."""
    if isinstance(usual, Mapping):
        if isinstance(value, Mapping):
            return {further: _json(further, each) for further, each in value.items()}
    elif isinstance(usual, tuple):
        wanted = str if name == "stop" else int
        if isinstance(value, list) and all(isinstance(each, wanted) for each in value):
            return tuple(value)
    elif isinstance(value, int | float) and math.isfinite(value) and (isinstance(usual, float) or value == int(value)):
        return type(usual)(value)
    raise ValueError(f"sampling setting {name} cannot be {value!r}")


def _json(name: str, value: Any) -> Any:
    """Return the value as the body of a request has it, with texts as the keys of objects.  Raises ValueError."""
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    except TypeError as error:  # the client of the engines would raise it, which would end the run
        raise ValueError(f"sampling setting {name} cannot be {value!r:.80}: {error}") from error


def _finite(value: Any, name: str) -> float:
    number = _number(value, name)
    if not is_usable(number):
        raise ValueError(f"{name} must be one number from -1e15 to 1e15, got {value!r:.80}")
    return number


def _number(value: Any, name: str) -> float:
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be one number, got {value!r}")  # noqa: TRY004 (it is the user's value)
    return float(value)
