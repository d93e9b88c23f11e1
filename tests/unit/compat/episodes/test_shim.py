"""The package ``slime`` that user files import."""

import asyncio
import contextlib
import importlib
import logging
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from asyncrl.compat import Sample, provide_slime
from asyncrl.compat.episodes.needs import has_symbol, needs_of
from tests.virtual_time import run_virtually

SURFACE = """
utils.types.Sample utils.types.SampleStatus utils.http_utils.post utils.http_utils.get utils.http_utils._http_client
utils.http_utils.get_host_info utils.http_utils.init_http_client utils.http_utils.get_rollout_num_engines
rollout.sglang_rollout.GenerateState rollout.sglang_rollout.generate rollout.sglang_rollout.generate_and_rm
rollout.sglang_rollout.generate_and_rm_group rollout.sglang_rollout.get_model_url rollout.sglang_rollout.eval_rollout
rollout.sglang_rollout.generate_rollout rollout.sglang_rollout._prepare_prompt_ids
rollout.base_types.RolloutFnTrainOutput rollout.base_types.RolloutFnEvalOutput rollout.base_types.call_rollout_fn
rollout.filter_hub.base_types.DynamicFilterOutput rollout.filter_hub.base_types.call_dynamic_filter
rollout.filter_hub.base_types.should_drop_dynamic_filter_output rollout.filter_hub.base_types.MetricGatherer
rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std rollout.rm_hub.async_rm
rollout.rm_hub.batched_async_rm rollout.rm_hub.grade_answer_verl rollout.rm_hub.extract_boxed_answer
rollout.rm_hub.get_deepscaler_rule_based_reward rollout.rm_hub.compute_score_dapo rollout.rm_hub.f1_score
rollout.rm_hub.compute_gpqa_reward rollout.rm_hub.math_dapo_utils.compute_score
rollout.rm_hub.math_utils.extract_answer rollout.rm_hub.math_utils.grade_answer_verl
rollout.rm_hub.math_utils.grade_answer_mathd rollout.rm_hub.math_utils.grade_answer_sympy utils.misc.load_function
utils.misc.SingletonMeta utils.processing_utils.load_tokenizer utils.processing_utils.load_processor
utils.processing_utils.build_processor_kwargs utils.processing_utils.encode_image_for_rollout_engine
utils.processing_utils.process_vision_info utils.async_utils.run utils.mask_utils.get_response_lengths
utils.mask_utils.MultiTurnLossMaskGenerator utils.eval_config.EvalDatasetConfig rollout.data_source.DataSource
observability.trace_utils.trace_span observability.trace_utils.trace_function utils.trace_utils.trace_span
observability.trace_utils.build_sglang_meta_trace_attrs utils.logging_utils ray.rollout.compute_rollout_step
utils.metric_utils.compute_rollout_step backends.megatron_utils.cp_utils.all_gather_with_cp
backends.megatron_utils.cp_utils.slice_log_prob_with_cp
"""


def slime(name: str) -> Any:
    provide_slime()
    return importlib.import_module(f"slime.{name}")


@pytest.mark.parametrize("symbol", SURFACE.split())
def test_every_symbol_of_the_surface_is_there(symbol: str) -> None:
    module, _, name = symbol.rpartition(".")
    assert has_symbol(f"slime.{symbol}")
    if symbol != "utils.logging_utils":
        assert hasattr(slime(module), name)


def test_needs_are_told_with_file_and_line_unless_they_are_guarded(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(
        "import slime.agent.adapters\n"
        "from slime.utils.misc import load_function, exec_command\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from slime.nowhere import X\n"
        "try:\n    from slime.agent import harness\nexcept (ImportError, OSError):\n    harness = None\n"
        "class A:\n    def f(self):\n        from slime.utils.types import RolloutBatch\n"
        "from slime.utils.types import *\n"
    )
    found = needs_of(file)
    assert [str(need) for need in found] == [
        "user.py:1 needs slime.agent.adapters, which asyncrl does not have",
        "user.py:2 needs slime.utils.misc.exec_command, which asyncrl does not have",
        "user.py:12 needs slime.utils.types.RolloutBatch, which asyncrl does not have",
    ]
    assert [need.is_at_import for need in found] == [True, True, False]


# ---- HTTP


def served(answer: Callable[[web.Request], web.Response], call: Callable[[str], Any]) -> Any:
    """Return what ``call`` returns for the address of a server, with a key in it."""

    async def main() -> Any:
        async def respond(request: web.BaseRequest) -> web.StreamResponse:
            return answer(request)  # type: ignore[arg-type]

        server = await asyncio.get_running_loop().create_server(web.Server(respond), "127.0.0.1", 0)
        async with asyncio.timeout(20), server, contextlib.aclosing(slime("utils.http_utils").client()):
            return await call(f"http://KEY:SECRET@127.0.0.1:{server.sockets[0].getsockname()[1]}/generate")

    return asyncio.run(main())


def test_post_sends_the_key_of_the_address_and_returns_json_or_text() -> None:
    seen = []

    def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({"a": 1}) if len(seen) == 1 else web.Response(text="plain")

    async def call(url: str) -> Any:
        post = slime("utils.http_utils").post
        return await post(url, {"x": 1}), await post(url, {})

    assert served(answer, call) == ({"a": 1}, "plain")
    assert seen == ["Basic S0VZOlNFQ1JFVA=="] * 2


def test_post_raises_a_refusal_at_once_and_shows_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    seen = []

    def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(status=410, text="EpisodeEnded")

    with pytest.raises(httpx.HTTPStatusError) as error:
        served(answer, lambda url: slime("utils.http_utils").post(url, {}))
    assert len(seen) == 1
    assert "KEY" not in str(error.value) + caplog.text


def test_post_tries_again_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    module = slime("utils.http_utils")
    monkeypatch.setattr(module, "RETRY_AFTER_S", 0.001)
    seen = []

    def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({}) if len(seen) == 3 else web.Response(status=503, text="busy")

    assert served(answer, lambda url: module.post(url, {})) == {}
    assert len(seen) == 3
    seen.clear()
    with pytest.raises(httpx.HTTPStatusError):
        served(answer, lambda url: module.post(url, {}, max_retries=2))
    assert len(seen) == 2


def test_numbers_of_engines() -> None:
    count = slime("utils.http_utils").get_rollout_num_engines
    assert count(Namespace(rollout_num_engines=3)) == 3
    assert count(Namespace(rollout_num_gpus=8, rollout_num_gpus_per_engine=4)) == 2
    assert count(Namespace(rollout_num_gpus=None)) == 0


# ---- rewards and filters


def args_of(**more: Any) -> Namespace:
    return Namespace(**{"custom_rm_path": None, "rm_type": None, "rm_url": None, "reward_key": None} | more)


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "reward"),
    [
        ("math", "so \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("math", "so \\boxed{2}", "3", 0),
        ("deepscaler", "<think>x</think> \\boxed{12}", "12", 1),
        ("deepscaler", "\\boxed{12}", "12", 0),
        ("f1", "the cat sat", "a cat", 2 / 3),
        ("gpqa", "The answer is B", "B", 1.0),
        ("boxed_f1", "so \\boxed{cat}", "cat", 1.0),
        ("boxed_math", "so \\boxed{7}", "7", 1),
    ],
)
def test_types_of_rewards(rm_type: str, response: str, label: str, reward: float) -> None:
    sample = Sample(response=response, label=label)
    hub = slime("rollout.rm_hub")
    assert run_virtually(hub.batched_async_rm(args_of(rm_type=rm_type), [sample]))[0] == [pytest.approx(reward)]
    sample.metadata["rm_type"] = rm_type
    assert run_virtually(hub.async_rm(args_of(rm_type="exact"), sample))[0] == pytest.approx(reward)


def test_dapo_scores_the_last_line_or_the_last_box() -> None:
    score = slime("rollout.rm_hub.math_dapo_utils").compute_score
    assert score("so\nAnswer: 1,000", "1000") == {"score": 1.0, "acc": True, "pred": "1000"}
    assert score("nothing", "7")["pred"] == "[INVALID]"
    assert score("so \\boxed{7}", "7", strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "7"}
    assert score("so \\boxed{7}" + "." * 100, "7", strict_box_verify=True)["pred"] is None


def test_the_filter_of_equal_rewards_takes_lists_of_samples() -> None:
    keep = slime("rollout.filter_hub.dynamic_sampling_filters").check_reward_nonzero_std
    assert keep(args_of(), [Sample(reward=1.0), Sample(reward=0.0)]).keep
    assert keep(args_of(), [[Sample(reward=1.0)], [Sample(reward=1), Sample(reward=1.0)]]).reason == "zero_std_1.0"


def test_whole_rollout_loops_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="asyncrl has no generate_rollout: its controller decides"):
        slime("rollout.sglang_rollout").generate_rollout(args_of(), 0, None)


# ---- small things


def test_singletons_are_one_per_class() -> None:
    misc = slime("utils.misc")

    class One(metaclass=misc.SingletonMeta):  # type: ignore[name-defined]
        def __init__(self, value: int) -> None:
            self.value = value

    first = One(1)
    assert One(2) is first
    One.clear_instances()
    assert One(2).value == 2
    One.clear_instances()


def test_coroutines_run_from_a_thread_without_a_loop() -> None:
    async def double(value: int) -> int:
        return 2 * value

    assert slime("utils.async_utils").run(double(4)) == 8


def test_traces_do_nothing() -> None:
    traces = slime("observability.trace_utils")

    @traces.trace_function("name", target="sample")  # type: ignore[untyped-decorator]
    def doubled(value: int) -> int:
        with traces.trace_span(None, "inner", attrs={}) as span:
            span.update({"a": 1})
        return 2 * value

    assert doubled(3) == 6


# ---- Sample


def test_appended_tokens_keep_mask_and_logprobs_aligned() -> None:
    sample = Sample(tokens=[1, 2])
    mask: list[int] = []
    sample.loss_mask = mask
    sample.append_response_tokens(
        None, tokens=[3, 4], log_probs=[-1.0, -2.0], text="a", meta_info={"finish_reason": {"type": "length"}}
    )
    sample.append_response_tokens(tokens=[5], trainable=False)
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 2, 3, 4, 5], 3, "a")
    assert sample.loss_mask is mask
    assert (mask, sample.rollout_log_probs) == ([1, 1, 0], [-1.0, -2.0, 0.0])
    assert sample.status is Sample.Status.TRUNCATED


def test_a_log_prob_that_the_engine_did_not_tell_is_nan() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2, 3], log_probs=[None, -0.5])
    assert sample.rollout_log_probs is not None
    assert math.isnan(sample.rollout_log_probs[0])
    assert sample.rollout_log_probs[1] == -0.5


def test_an_observation_first_gets_ones_for_what_was_there() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    sample.append_response_tokens(tokens=[4], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [0.0, 0.0, 0.0])


def test_meta_info_of_an_answer_sets_status_and_version() -> None:
    sample = Sample()
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "3", "cached_tokens": 5, "prompt_tokens": 8}
    sample.update_from_meta_info(args_of(), meta)
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["3"])
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (5, 8)
    sample.update_from_meta_info(args_of(), {"finish_reason": {"type": "stop"}} | meta)
    assert sample.weight_versions == ["3", "3"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"tokens": [1]}, "trainable tokens need log_probs"),
        ({"tokens": [1], "log_probs": [0.0, 0.0]}, "tokens has 1 entries, log_probs has 2"),
        ({"tokens": [1], "log_probs": [0.0], "trainable": False}, "must have no log_probs"),
    ],
)
def test_tokens_without_their_logprobs_are_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Sample().append_response_tokens(**given)
