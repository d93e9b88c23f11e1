"""The check of requests, on objects shaped like SGLang's; tests of the server send the same to a real one."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engines.sglang.plugin.request_check import RequestCheck

VOCABULARY = 64


def manager(*, device: str = "cpu", end: int | None = 63, is_deterministic: bool = True) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=VOCABULARY),
        server_args=SimpleNamespace(device=device, random_seed=1, enable_deterministic_inference=is_deterministic),
        tokenizer=SimpleNamespace(eos_token_id=end),
    )


def request(*, tokens: tuple[int, ...] | None = (5, 9), start: int = -1, top: int = 0, **sampling: Any) -> Any:
    defaults = {
        "top_k": 1 << 30,
        "min_p": 0.0,
        "temperature": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
        "logit_bias": None,
        "sampling_seed": 7,
        **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag")),
    }
    return SimpleNamespace(
        input_ids=None if tokens is None else array("q", tokens),
        logprob_start_len=start,
        top_logprobs_num=top,
        sampling_params=SimpleNamespace(**{**defaults, **sampling}),
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tokens": (5, 64, 70)}, "input_ids has token 64, but the model's vocabulary has tokens 0 to 63"),
        ({"tokens": (5, -1)}, "input_ids has token -1"),
        ({"start": -2}, "logprob_start_len must be -1 or more, got -2"),
        ({"top": 65}, "top_logprobs_num must be at most 64"),
        ({"top_k": 2**31}, "top_k must be below 2147483648"),
        ({"sampling_seed": 2**63}, "sampling_seed must be a whole number of 64 bits"),
        ({"sampling_seed": "x"}, "sampling_seed must be a whole number of 64 bits, got x"),
        ({"temperature": 1e39}, "temperature must be a number of 32 bits"),
        ({"logit_bias": {"3": 1.0, "4": -1e39}}, "logit_bias of token 4 must be a number of 32 bits, got -1e\\+39"),
        ({"logit_bias": {"3": float("nan")}}, "logit_bias of token 3"),
        ({"min_new_tokens": 1, "stop_token_ids": {64}}, "stop_token_ids has token 64"),
        ({"json_schema": {"type": "object"}}, "json_schema must be text, got a dict"),
        ({"regex": ["a"]}, "regex must be text, got a list"),
        ({"ebnf": {}}, "ebnf must be text, got a dict"),
        ({"structural_tag": {"structures": []}}, "structural_tag must be text, got a dict"),
        ({"structural_tag": ""}, "structural_tag must not be empty"),
    ],
)
def test_a_value_that_would_end_the_server_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RequestCheck().after_checks(request(**wrong), manager())


def test_min_new_tokens_needs_an_end_token() -> None:
    RequestCheck().after_checks(request(min_new_tokens=1, stop_token_ids={63}), manager())
    with pytest.raises(ValueError, match="needs a tokenizer with an end token"):
        RequestCheck().after_checks(request(min_new_tokens=1), manager(end=None))


def test_min_p_is_refused_only_where_the_draw_would_fail() -> None:
    RequestCheck().after_checks(request(min_p=0.1), manager())
    RequestCheck().after_checks(request(min_p=0.1), manager(device="cuda", is_deterministic=False))
    with pytest.raises(ValueError, match="enable-deterministic-inference"):
        RequestCheck().after_checks(request(min_p=0.1), manager(device="cuda"))


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"tokens": (0, 63)},
        {"tokens": None},
        {"stop_token_ids": {64}},
        {"top": 64, "start": 0},
        {"top_k": 2**31 - 1},
        {"json_schema": '{"type": "object"}'},
        {"structural_tag": "{}"},
    ],
)
def test_a_possible_request_passes(right: dict[str, Any]) -> None:
    asked = request(**right)
    RequestCheck().after_checks(asked, manager())
    assert asked.sampling_params.sampling_seed == 7


def test_requests_without_a_seed_get_different_ones_on_a_cpu_only() -> None:
    check, seeds = RequestCheck(), []
    for device in ("cpu", "cpu", "cpu", "cuda"):
        asked = request(sampling_seed=None)
        check.after_checks(asked, manager(device=device, is_deterministic=False))
        seeds.append(asked.sampling_params.sampling_seed)
    assert len(set(seeds[:3])) == 3
    assert seeds[3] is None


def test_a_request_for_embeddings_passes() -> None:
    asked = SimpleNamespace(input_ids=array("q", [99]))
    RequestCheck().after_checks(asked, manager())
    assert not hasattr(asked, "sampling_params")
