"""Sampling settings from the fields of a request, with the run's settings where the request names none."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.rollouts.further_settings import FURTHER_SETTINGS
from asyncrl.rollouts.gateway.fields import Body, dumped, flag, integer, mapping, number, shown, texts, token_ids
from asyncrl.rollouts.gateway.refusals import bad
from asyncrl.types import SamplingParams

_READ_HERE = frozenset(
    {
        *("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens", "repetition_penalty", "stop"),
        *("stop_token_ids", "n", "skip_special_tokens", "no_stop_trim"),
    }
)
_WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens", "sampling_seed", "stream_interval"})
"""Parameters that are accepted and not used: each call gets a seed of its episode, because calls without one, or with
the same one, draw alike."""
_GENERATE_NAMES = _READ_HERE | _WITHOUT_EFFECT | FURTHER_SETTINGS.keys()

_MOST_ANSWERS = 1024
"""Answers of one request, at most: each is a task and an engine call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The settings of one request."""

    sampling: SamplingParams
    n: int = 1
    """Number of answers."""
    skips_special_tokens: bool = True
    """Whether texts lack special tokens."""
    keeps_stop: bool = False
    """Whether texts keep the stop text or stop token that ended them."""


def asked_by_sglang(params: Mapping[str, Any], run: SamplingParams) -> Asked:
    """Return the settings of ``sampling_params`` of SGLang.  Raises RequestRefused, with SGLang's texts."""
    if wrong := next((name for name in params if name not in _GENERATE_NAMES), None):
        raise bad(f"Unexpected keyword argument '{wrong}'")
    return Asked(
        sampling=_checked(params, run, integer(params, "max_new_tokens", run.max_new_tokens, 0)),
        n=_num_answers(params),
        skips_special_tokens=flag(params, "skip_special_tokens", default=True),
        keeps_stop=flag(params, "no_stop_trim"),
    )


def asked_by_openai(body: Body, run: SamplingParams, *, skips_special_tokens: bool = True) -> Asked:
    """Return the settings of a request of OpenAI or Anthropic.  Raises RequestRefused.

    The run's ``max_new_tokens`` is an upper limit, because agents name limits of other models.
    """
    most = integer(body, "max_completion_tokens", integer(body, "max_tokens", run.max_new_tokens, 1), 1)
    params = {**body, "min_new_tokens": body.get("min_tokens"), **_response_format(body)}
    return Asked(
        sampling=_checked(params, run, min(most, run.max_new_tokens)),
        n=_num_answers(body),
        skips_special_tokens=flag(body, "skip_special_tokens", default=skips_special_tokens),
        keeps_stop=flag(body, "no_stop_trim"),
    )


def _num_answers(params: Mapping[str, Any]) -> int:
    found = integer(params, "n", 1, 1)
    if found > _MOST_ANSWERS:
        raise bad(f"n must be at most {_MOST_ANSWERS}, got {shown(found)}")
    return found


def _checked(params: Mapping[str, Any], run: SamplingParams, max_new_tokens: int) -> SamplingParams:
    temperature = number(params, "temperature", run.temperature)
    if not math.isfinite(temperature) or temperature < 0:
        raise bad(f"temperature must be a non-negative finite number, got {temperature}.")
    top_p = number(params, "top_p", run.top_p)
    if not 0 < top_p <= 1:
        raise bad(f"top_p must be in (0, 1], got {top_p}.")
    top_k = integer(params, "top_k", run.top_k, -1)
    if top_k == 0:
        raise bad("top_k must be -1 (disable) or at least 1, got 0.")
    penalty = number(params, "repetition_penalty", run.repetition_penalty)
    if not 0 < penalty <= 2:
        raise bad(f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {penalty}.")
    min_new_tokens = integer(params, "min_new_tokens", min(run.min_new_tokens, max_new_tokens), 0)
    if min_new_tokens > max_new_tokens:
        raise bad(f"min_new_tokens must be in [0, max_new_tokens({max_new_tokens})], got {min_new_tokens}.")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        stop=texts(params, "stop") if params.get("stop") is not None else run.stop,
        stop_token_ids=_stop_token_ids(params, run),
        min_new_tokens=min_new_tokens,
        repetition_penalty=penalty,
        extra={**run.extra, **_sent_on(params)},
    )


def _sent_on(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that the engines get as they are.  Raises RequestRefused."""
    found = {name: params[name] for name in FURTHER_SETTINGS.keys() & params.keys() if params[name] is not None}
    for name, value in found.items():
        dumped(value, name)  # refuses what the client of the engines cannot write, which would end the run
    return found


def _stop_token_ids(params: Mapping[str, Any], run: SamplingParams) -> tuple[int, ...]:
    return (
        tuple(token_ids(params, "stop_token_ids")) if params.get("stop_token_ids") is not None else run.stop_token_ids
    )


def _response_format(body: Body) -> Body:
    """Return OpenAI's ``response_format`` as SGLang's ``json_schema``."""
    wanted = mapping(body, "response_format")
    match wanted.get("type", "text"):
        case "text":
            return {}
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "json_schema":
            schema = mapping(wanted, "json_schema").get("schema")
            if not isinstance(schema, dict):
                raise bad("response_format.json_schema.schema must be an object")
            return {"json_schema": json.dumps(schema)}
        case other:
            raise bad(f"response_format.type must be text, json_object or json_schema, got {shown(other)}")
