"""The layouts that are refused, and the error lines."""

import re
from typing import Any

import pytest

from asyncrl.capacity.layout import check_engines, check_layout
from asyncrl.config.areas.parallel import ParallelConfig, parallel_problems
from asyncrl.errors import ConfigError
from asyncrl.models.shape import shape_of

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
MIXTURE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def refusal(config: dict[str, Any], parallel: dict[str, Any], device: str) -> str | None:
    try:
        check_layout(shape_of(config), ParallelConfig(**parallel), device)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("config", "parallel", "device", "words"),
    [
        (DENSE, {"tensor_model_parallel_size": 8}, "cuda", r"8 does not divide the model's KV heads \(4\)"),
        (DENSE, {"tensor_model_parallel_size": 5}, "cuda", r"5 does not divide the model's vocabulary size \(96\)"),
        (DENSE, {"pipeline_model_parallel_size": 4}, "cuda", "6 layers cannot be split evenly over 4 stages"),
        (
            DENSE,
            {"pipeline_model_parallel_size": 4, "decoder_last_pipeline_num_layers": 1},
            "cuda",
            "6 layers less 1 at the ends cannot be split evenly over 3 stages",
        ),
        (DENSE, {"decoder_first_pipeline_num_layers": 1}, "cuda", "without pipeline-model-parallel-size"),
        (DENSE, {"expert_model_parallel_size": 2}, "cuda", "the model has no experts"),
        (
            DENSE,
            {"recompute_granularity": "selective", "recompute_modules": ("mlp", "mla_up_proj")},
            "cuda",
            "recompute-modules mla_up_proj: the model has no latent attention; leave it out",
        ),
        (MIXTURE, {"expert_model_parallel_size": 4}, "cuda", "4 does not divide the model's 6 experts"),
        (
            MIXTURE,
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 5},
            "cuda",
            r"^expert-tensor-parallel-size 5 does not divide the experts' FFN hidden size \(64\)$",
        ),
        (
            MIXTURE,
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 16},
            "cuda",
            r"16: the experts' FFN hidden size \(64\) is not a multiple of 8 on each rank, which a GPU needs",
        ),
        (
            MIXTURE,
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "cuda",
            "Megatron would not sum up the experts' gradients",
        ),
        (
            MIXTURE,
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
            "cpu",
            "2 with expert-model-parallel-size 2 cannot run on a CPU",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    config: dict[str, Any], parallel: dict[str, Any], device: str, words: str
) -> None:
    assert re.search(words, str(refusal(config, parallel, device)))


@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        (DENSE, {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 3}),
        (DENSE, {"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 2}),
        (DENSE, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}),
        (MIXTURE, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 4}),
        (MIXTURE, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    ],
)
def test_a_layout_that_divides_the_model_is_accepted(config: dict[str, Any], parallel: dict[str, Any]) -> None:
    assert refusal(config, parallel, "cuda") is None


def test_only_a_gpu_refuses_expert_sizes_that_are_not_multiples_of_8() -> None:
    odd = {**MIXTURE, "moe_intermediate_size": 20}
    assert refusal(odd, {}, "cpu") is None
    assert "is not a multiple of 8" in str(refusal(odd, {}, "cuda"))


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "words"),
    [
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, 6, r"x context-parallel-size 2 = 4 does not"),
        ({"expert_model_parallel_size": 4}, 6, r"expert-model-parallel-size 4 x .* = 4 does not divide .* 6 ranks"),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            2,
            "no-sequence-parallel with tensor-model-par",
        ),
        ({"recompute_num_layers": 2}, 1, "recompute-num-layers without recompute-granularity full"),
        ({"recompute_modules": ("mlp",)}, 1, "recompute-modules without recompute-granularity selective"),
    ],
)
def test_each_contradiction_in_a_layout_is_one_line(parallel: dict[str, Any], num_ranks: int, words: str) -> None:
    (line,) = parallel_problems(ParallelConfig(**parallel), num_ranks)
    assert re.search(words, line)


@pytest.mark.parametrize(("size", "given"), [(1, True), (2, True), (1, False)])
def test_sequence_parallel_may_be_given_explicitly(size: int, given: bool) -> None:
    assert parallel_problems(ParallelConfig(tensor_model_parallel_size=size, sequence_parallel=given), 2) == []


ATTENTION = {"enable-dp-attention": True}


@pytest.mark.parametrize(
    ("config", "num_gpus", "flags", "line"),
    [
        (DENSE, 3, {}, "rollout-num-gpus-per-engine 3 does not divide the model's attention heads (8)"),
        (DENSE, 16, {}, "rollout-num-gpus-per-engine 16 does not divide the model's attention heads (8)"),
        (
            {**DENSE, "num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            {},
            "rollout-num-gpus-per-engine 6 neither divides the model's KV heads (4) nor is a multiple of them",
        ),
        (
            {**DENSE, "intermediate_size": 44},
            8,
            {},
            "rollout-num-gpus-per-engine 8 does not divide the model's FFN hidden size (44)",
        ),
        (MIXTURE, 6, {**ATTENTION, "dp-size": "4"}, "sglang-dp-size 4 does not divide rollout-num-gpus-per-engine 6"),
        (
            MIXTURE,
            6,
            {**ATTENTION, "data-parallel-size": "2"},
            "rollout-num-gpus-per-engine 6 with sglang-dp-size 2 does not divide the model's attention heads (8)",
        ),
    ],
)
def test_engines_that_sglang_cannot_split_are_refused(
    config: dict[str, Any], num_gpus: int, flags: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_engines(shape_of(config), num_gpus, flags)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("config", "num_gpus", "flags"),
    [
        (DENSE, 1, {}),
        (DENSE, 8, {}),  # two GPUs have a copy of each KV head
        (MIXTURE, 6, {**ATTENTION, "dp-size": "6"}),
        (MIXTURE, 3, {"attn-cp-size": "3"}),
    ],
)
def test_engines_that_sglang_can_split_are_accepted(
    config: dict[str, Any], num_gpus: int, flags: dict[str, Any]
) -> None:
    refused: list[ConfigError] = []
    try:
        check_engines(shape_of(config), num_gpus, flags)
    except ConfigError as error:
        refused.append(error)
    assert refused == []
