"""Requests as user functions may send them, right or wrong: none ends a real server."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.sglang_server import BEARER, SILENCE_S, Servers

pytestmark = [pytest.mark.timeout(1080), pytest.mark.filterwarnings("ignore::SyntaxWarning")]

PLAIN = {"input_ids": [5, 9, 33], "sampling_params": {"max_new_tokens": 8}}
REFUSED: dict[str, dict[str, Any]] = {
    "token beyond the vocabulary": {"input_ids": [5, 64]},
    "negative token": {"input_ids": [5, -1]},
    "no token": {"input_ids": []},
    "log-probs from before the prompt": {"return_logprob": True, "logprob_start_len": -5},
    "log-probs from behind the prompt": {"return_logprob": True, "logprob_start_len": 50},
    "more log-probs than tokens": {"return_logprob": True, "top_logprobs_num": 500},
    "log-probs of unknown tokens": {"return_logprob": True, "token_ids_logprob": [1000]},
    "too long": {"input_ids": [5] * 9000},
}
REFUSED_SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1},
    "huge temperature": {"temperature": 1e39},
    "top_p": {"top_p": 0},
    "top_k": {"top_k": 0},
    "huge top_k": {"top_k": 2**31},
    "seed": {"sampling_seed": 2**63},
    "bias of an unknown token": {"logit_bias": {"70": 1.0}},
    "huge bias": {"logit_bias": {str(token): -1e39 for token in range(64)}},
    "least tokens without an end token": {"min_new_tokens": 5},
    "max tokens": {"max_new_tokens": -1},
    "schema": {"json_schema": '{"type": "object"}'},
    "regex": {"regex": "[0-9]+"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "schema that is no text": {"json_schema": {"type": "object"}},
    "regex that is no text": {"regex": ["[0-9]+"]},
    "ebnf that is no text": {"ebnf": {"root": "a"}},
    "tag that is no text": {"structural_tag": {"structures": [], "triggers": []}},
    "empty tag": {"structural_tag": ""},
}
ANSWERED_SAMPLING: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.1},
    "min_p with a seed": {"min_p": 0.1, "sampling_seed": 5},
    "all limits": {"min_p": 0.1, "top_k": 5, "top_p": 0.5},
    "greedy": {"temperature": 0},
    "tiny top_p": {"top_p": 1e-9},
    "tiny temperature": {"temperature": 1e-5},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 1.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {"7": 100.0}},
    "stop texts": {"stop": ["a", "b"]},
    "stop pattern": {"stop_regex": "[a-f]"},
    "stop token beyond the vocabulary": {"stop_token_ids": [10**6]},
    "no tokens": {"max_new_tokens": 0},
    "slime's": {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False},
}
FAILED_SAMPLING: dict[str, dict[str, Any]] = {
    "temperature that is text": {"temperature": "hot"},
    "unknown parameter": {"foo": 1},
    "broken pattern": {"stop_regex": "["},
}


def ask(servers: Servers, body: dict[str, Any]) -> tuple[int, Any]:
    """The status and the parsed answer; None for an answer that is not JSON."""
    data, headers = json.dumps({**PLAIN, **body}).encode(), {"Content-Type": "application/json", **BEARER}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{servers.engine_url}/generate", data, headers), timeout=SILENCE_S
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, None


def sampling(params: dict[str, Any]) -> dict[str, Any]:
    return {"sampling_params": {"max_new_tokens": 8, **params}}


def test_every_wrong_request_fails_alone(servers: Servers) -> None:
    for name, body in (REFUSED | {name: sampling(params) for name, params in REFUSED_SAMPLING.items()}).items():
        assert (name, ask(servers, body)[0]) == (name, 400)
        assert (name, ask(servers, {})[0]) == (name, 200)
    for name, params in FAILED_SAMPLING.items():
        assert (name, ask(servers, sampling(params))[0]) == (name, 500)
        assert (name, ask(servers, {})[0]) == (name, 200)


def test_every_right_request_is_answered(servers: Servers) -> None:
    for name, params in ANSWERED_SAMPLING.items():
        assert (name, ask(servers, sampling(params))[0]) == (name, 200)


def test_a_seeded_request_gets_the_same_tokens_alone_and_with_any_mates(servers: Servers) -> None:
    seeded: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 40, "sampling_seed": 11}
    mates: list[dict[str, Any]] = [{"temperature": 0}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2, "top_p": 0.9}]
    (alone,) = batch(servers, [seeded])
    together = batch(servers, [seeded, *({**seeded, **mate} for mate in mates)])
    assert together[0] == alone
    assert len({tuple(tokens) for tokens in together}) == len(together)


def batch(servers: Servers, params: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of one request for each of ``params``, all in one batch and without a cached prefix."""
    body = {"input_ids": [[5, 9, 33]] * len(params), "sampling_params": params}
    status, answers = ask(servers, body)
    assert status == 200
    return [answer["output_ids"] for answer in answers]


def test_requests_without_a_seed_differ(servers: Servers) -> None:
    found = batch(servers, [{"temperature": 1.0, "max_new_tokens": 20}] * 4)
    assert len({tuple(tokens) for tokens in found}) == 4
