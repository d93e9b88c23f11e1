"""Memory of trainer ranks against what H200s measured, and of engines against SGLang's rules."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.capacity.engine import engine_memory, engine_problems
from asyncrl.capacity.routes import route_memory
from asyncrl.capacity.trainer import (
    LOGITS_CHUNK_BYTES,
    RankMemory,
    RankWorkload,
    has_copy,
    stage_layers,
    trainer_memory,
    with_copy,
)
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.errors import ConfigError
from asyncrl.models.shape import ModelShape, read_shape, shape_of
from asyncrl.models.sizes import model_size
from benchmarks.common.shapes import SHAPES, num_weights

H200 = 143_771 * 2**20
"""Memory of an H200 in bytes, as its driver reports it."""
MEGATRON = Path(__file__).parents[3] / "asyncrl" / "engines" / "megatron"
MODELS = Path(__file__).parents[2] / "launch" / "models"


def rank(name: str, tokens: int = 16_384, num_ranks: int = 1, **layout: Any) -> RankMemory:
    """The first rank's memory."""
    work = RankWorkload(num_ranks=num_ranks, num_tokens=tokens, weight_bytes=2)
    return trainer_memory(shape_of(SHAPES[name]), ParallelConfig(**layout), work)[0]


@pytest.mark.parametrize(
    ("model", "num_ranks", "tokens", "layout", "measured_gib"),
    [
        ("1.7b", 1, 32_768, {}, 117.9),
        ("1.7b", 2, 32_768, {}, 108.2),
        ("1.7b", 2, 32_768, {"tensor_model_parallel_size": 2}, 60.0),
        ("1.7b", 4, 32_768, {"tensor_model_parallel_size": 2}, 55.2),
        ("1.7b", 4, 16_384, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 30.4),
        ("1.7b", 4, 16_384, {"context_parallel_size": 2}, 63.8),
        # Mixtures with one stacked parameter per matrix, 2026-11-23.
        ("moe-2b", 1, 16_384, {}, 50.3),
        ("moe-6b", 1, 8_192, {}, 115.7),
    ],
)
def test_estimates_agree_with_measurements_on_h200s(
    model: str, num_ranks: int, tokens: int, layout: dict[str, Any], measured_gib: float
) -> None:
    """Peaks of benchmarks/results/trainer_h200_2026-11-2*.md; the estimate was within 0.6 %."""
    assert rank(model, tokens, num_ranks, **layout).total / 2**30 == pytest.approx(measured_gib, rel=0.05)


@pytest.mark.parametrize(
    ("model", "num_ranks", "tokens", "has_copy", "layout", "measured_gb"),
    [
        ("qwen3-4b", 1, 4 * 2_288, True, {}, 135.69),
        ("glm-z1-9b", 2, 7 * 2_288, False, {"tensor_model_parallel_size": 2, "recompute_granularity": "full"}, 90.72),
    ],
)
def test_estimates_agree_with_measurements_of_rehearsed_scripts(
    model: str, num_ranks: int, tokens: int, has_copy: bool, layout: dict[str, Any], measured_gb: float
) -> None:
    """Peaks of benchmarks/results/rehearse_2xh200_2026-11-22.md, answers of 2,048 tokens behind prompts of 240."""
    shape = read_shape(MODELS / model)
    work = RankWorkload(num_ranks=num_ranks, num_tokens=tokens, weight_bytes=2)
    memory = trainer_memory(shape, ParallelConfig(**layout), work)[0]
    copy = 2 * model_size(shape).total if has_copy else 0.0
    assert (memory.total + copy) / 1e9 == pytest.approx(measured_gb, rel=0.005)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_weights_are_counted_one_by_one(name: str) -> None:
    assert model_size(shape_of(SHAPES[name])).total == num_weights(name, active=False)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-4b", 4.02), ("glm-z1-9b", 9.40), ("qwen3-30b-a3b", 30.53), ("deepseek-r1", 671.03)],
)
def test_released_models_have_as_many_weights_as_they_say(name: str, billions: float) -> None:
    """The counts leave out layers for multi-token prediction."""
    assert model_size(read_shape(MODELS / name)).total / 1e9 == pytest.approx(billions, abs=0.005)


def test_constants_are_those_of_the_modules_that_use_them() -> None:
    assert constant("model.logprobs", "CHUNK_BYTES") == LOGITS_CHUNK_BYTES


@pytest.mark.parametrize(
    ("model", "num_tokens", "limit", "wanted", "is_copied"),
    [
        ("1.7b", 16_384, 141e9, None, True),
        ("1.7b", 16_384, 141e9, False, False),
        ("1.7b", 16_384, 30e9, None, False),  # more than a tenth of the GPU
        ("moe-6b", 8_192, 135e9, None, False),  # a tenth, but the activations would not fit
        ("moe-6b", 8_192, 160e9, None, True),
        ("moe-6b", 8_192, 141e9, True, True),
    ],
)
def test_snapshots_are_planned_by_default_where_they_fit_with_everything_else(
    model: str, num_tokens: int, limit: float, wanted: bool | None, is_copied: bool
) -> None:
    shape, work = shape_of(SHAPES[model]), RankWorkload(num_ranks=1, num_tokens=num_tokens, weight_bytes=2)
    found = with_copy(shape, ParallelConfig(), work, limit=limit, wanted=wanted)
    assert found.copy_bytes == (2 * num_weights(model, active=False) if is_copied else 0)


@pytest.mark.parametrize(
    ("model", "num_ranks", "wanted", "num_tokens", "parallel", "memory", "is_copied"),
    [
        ("1.7b", 1, None, 16_384, ParallelConfig(), H200, True),
        ("1.7b", 1, False, 16_384, ParallelConfig(), H200, False),
        ("moe-6b", 1, None, 16_384, ParallelConfig(), H200, False),
        ("moe-6b", 1, None, 16_384, ParallelConfig(), None, True),  # a CPU
        ("moe-6b", 1, None, 1, ParallelConfig(), H200, True),  # activations need no memory
        ("moe-6b", 2, None, 16_384, ParallelConfig(expert_model_parallel_size=2), H200, True),
    ],
)
def test_a_rank_decides_by_its_own_gpu(
    model: str,
    num_ranks: int,
    wanted: bool | None,
    num_tokens: int,
    parallel: ParallelConfig,
    memory: int | None,
    is_copied: bool,
) -> None:
    work = RankWorkload(num_ranks=num_ranks, num_tokens=num_tokens, weight_bytes=2)
    assert has_copy(shape_of(SHAPES[model]), parallel, work, memory=memory, wanted=wanted) is is_copied


def constant(module: str, name: str) -> float:
    """A constant read from a module's source, because importing torch takes seconds."""
    for node in ast.parse((MEGATRON.joinpath(*module.split(".")).with_suffix(".py")).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return float(eval(ast.unparse(node.value)))
    raise AssertionError(f"{module} has no {name}")


def test_the_optimizer_is_shared_by_copies_unless_told_otherwise() -> None:
    shared, own = rank("1.7b", num_ranks=2), rank("1.7b", num_ranks=2, use_distributed_optimizer=False)
    assert own.optimizer == 2 * shared.optimizer
    assert own.optimizer == 12 * model_size(shape_of(SHAPES["1.7b"])).total
    assert (own.weights, own.gradients) == (shared.weights, shared.gradients)


def test_full_recomputation_keeps_the_inputs_of_layers() -> None:
    full = rank("1.7b", recompute_granularity="full")
    every_seventh = rank("1.7b", recompute_granularity="full", recompute_num_layers=7)
    block = rank("1.7b", recompute_granularity="full", recompute_method="block", recompute_num_layers=14)
    nothing = rank("1.7b")
    assert full.activations == 28 * 16_384 * 2048 * 2
    assert every_seventh.activations == full.activations / 7
    assert every_seventh.working > full.working
    assert block.activations == (full.activations + nothing.activations) / 2


def test_selective_recomputation_frees_the_recomputed_activations() -> None:
    nothing, mlp = rank("1.7b"), rank("1.7b", recompute_granularity="selective", recompute_modules=("mlp",))
    assert nothing.activations - mlp.activations == 28 * 16_384 * 5 * 6144 * 2
    assert rank("1.7b", recompute_granularity="selective").activations == nothing.activations


def test_recomputed_experts_and_mlps_free_nothing_in_layers_that_have_none() -> None:
    def activations(name: str, *modules: str) -> float:
        asked: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
        return rank(name, **asked).activations

    assert activations("1.7b", "moe") == activations("1.7b") > activations("1.7b", "mlp", "moe")
    assert activations("1.7b", "mlp", "moe") == activations("1.7b", "mlp")
    assert activations("moe-2b", "mlp") == activations("moe-2b") > activations("moe-2b", "moe")


def test_recomputed_attention_frees_what_context_parallel_ranks_gather() -> None:
    shared = {"context_parallel_size": 2}
    nothing, selective = rank("1.7b", **shared), rank("1.7b", **shared, recompute_activations=True)
    assert nothing.activations - selective.activations == 28 * 16_384 * (2 * 2) * (8 * 128) * 2
    assert selective == rank("1.7b", **shared, recompute_granularity="selective", recompute_modules=("core_attn",))


def test_stages_have_the_layers_that_they_were_given() -> None:
    layout = ParallelConfig(
        pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=2, decoder_last_pipeline_num_layers=5
    )
    assert [len(layers) for layers in stage_layers(13, layout)] == [2, 3, 3, 5]
    assert [layer for layers in stage_layers(13, layout) for layer in layers] == list(range(13))


def engine_flags(**flags: str | bool | tuple[str, ...]) -> dict[str, str | bool | tuple[str, ...]]:
    return {name.replace("_", "-"): value for name, value in flags.items()}


def test_the_kv_cache_is_what_weights_and_sglang_leave() -> None:
    shape = read_shape(MODELS / "qwen3-4b")
    found = engine_memory(
        shape,
        gpus_per_engine=2,
        limit=80e9,
        weight_bytes=2,
        flags=engine_flags(mem_fraction_static="0.75"),
        update_buffer_size=10**9,
    )
    assert found.kv_cache == pytest.approx(0.75 * 80e9 - found.weights)
    assert found.token_bytes == 36 * 2 * 4 * 128 * 2  # layers, keys and values, heads of one GPU, numbers, bytes
    assert engine_problems(found, gpus_per_engine=2, longest=found.kv_tokens) == []
    (line,) = engine_problems(found, gpus_per_engine=2, longest=found.kv_tokens + 1)
    assert "one answer with its prompt may have" in line


def engine(shape: ModelShape, limit: float, **flags: str | bool | tuple[str, ...]) -> Any:
    return engine_memory(
        shape,
        gpus_per_engine=8,
        limit=limit,
        weight_bytes=2,
        flags=engine_flags(**flags),
        update_buffer_size=512 * 1024**2,
    )


def test_latent_attention_caches_one_narrow_vector_on_every_gpu() -> None:
    shape = read_shape(MODELS / "deepseek-r1")
    assert engine(shape, 288e9).token_bytes == 61 * (512 + 64) * 2
    assert engine(shape, 288e9, kv_cache_dtype="fp8_e4m3").token_bytes == 61 * (512 + 64)


def test_every_copy_of_the_attention_takes_memory() -> None:
    """With SGLang's DP attention, eight GPUs have eight copies of attention and embedding, and a larger reserve."""
    shape = read_shape(MODELS / "deepseek-r1")
    one, eight = engine(shape, 288e9), engine(shape, 288e9, enable_dp_attention=True, dp_size="8")
    heads, hidden = 128, 7168
    split = 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * hidden  # queries, keys with values, outputs
    assert eight.weights - one.weights == pytest.approx((61 * split + 129_280 * hidden) * 2 * 7 / 8)
    assert eight.free - one.free == 512 * 8 * 4.5 * 1024**2
    assert eight.token_bytes == one.token_bytes, "each GPU has a narrow vector either way"
    assert (one.attention_copies, eight.attention_copies) == (1, 8)
    fp8 = engine(replace(shape, fp8_block=(128, 128)), 288e9, enable_dp_attention=True, dp_size="8")
    assert fp8.weights == pytest.approx(eight.weights / 2, rel=0.05)
    dense = read_shape(MODELS / "qwen3-4b")
    two = engine(dense, 141e9, enable_dp_attention=True, dp_size="2")
    assert two.token_bytes == 2 * engine(dense, 141e9).token_bytes, "four GPUs share eight KV heads"


@pytest.mark.parametrize(
    ("flags", "largest", "each"),
    [
        ({"cuda_graph_max_bs": "128"}, 128, 3),
        ({"cuda_graph_max_bs_decode": "400"}, 400, 4.5),
        ({"cuda_graph_bs": ("1", "2", "160"), "cuda_graph_max_bs_decode": "400"}, 160, 3),
        ({"cuda_graph_bs_decode": "64"}, 64, 3),
        ({"cuda_graph_bs": True}, 512, 4.5),
    ],
)
def test_the_reserve_of_copies_follows_the_largest_graph(flags: dict[str, Any], largest: int, each: float) -> None:
    shape = read_shape(MODELS / "deepseek-r1")
    given = engine(shape, 141e9, enable_dp_attention=True, dp_size="8", **flags)
    mebis = 512 + 1.5 * 8192 + 128 * 8 + 2 * largest + each * largest * 8
    assert given.free == mebis * 1024**2


def test_an_engine_in_fp8_holds_a_byte_for_each_number_of_its_matrices() -> None:
    shape = read_shape(MODELS / "deepseek-r1")
    in_full, in_fp8 = engine(shape, 141e9), engine(replace(shape, fp8_block=(128, 128)), 141e9)
    embeddings = 2 * 129_280 * 7168 / 8  # the embedding and the output layer stay in bfloat16
    assert in_fp8.weights - 2 * embeddings == pytest.approx(
        (in_full.weights - 2 * embeddings) / 2, rel=2e-3
    )  # scales, norms
    assert engine_problems(in_full, gpus_per_engine=8, longest=34_816)
    assert not engine_problems(in_fp8, gpus_per_engine=8, longest=34_816)


def test_the_reserve_follows_sglangs_rule() -> None:
    """SGLang's rule for an H200, in MiB: 512, 1.5 per token of 8,192, 128 per GPU, and 2 per answer of 512."""
    found = engine(read_shape(MODELS / "qwen3-4b"), 141e9)
    assert found.free == (512 + 1.5 * 8192 + 128 * 8 + 2 * 512) * 1024**2


def test_limits_of_the_user_hold() -> None:
    shape = read_shape(MODELS / "qwen3-4b")
    assert engine(shape, 141e9, max_total_tokens="1000").kv_tokens == 1000
    with pytest.raises(ConfigError, match="--sglang-mem-fraction-static must be a number, got most"):
        engine(shape, 141e9, mem_fraction_static="most")
    (line,) = engine_problems(engine(shape, 141e9, mem_fraction_static="0.999"), gpus_per_engine=8, longest=1)
    assert "leaves 0.1 GB free" in line


@pytest.mark.parametrize(
    ("name", "recorded", "sent"), [("qwen3-30b-a3b", 384, 384), ("deepseek-r1", 488, 464), ("qwen3-4b", None, None)]
)
def test_routes_take_one_byte_in_engines_and_in_samples(name: str, recorded: int | None, sent: int | None) -> None:
    """Bytes per token: on engines' GPUs for all layers, in samples for mixture layers."""
    memory = route_memory(read_shape(MODELS / name), kv_tokens=999_936, page_size=64, batch_tokens=1_000)
    assert (memory is None) == (recorded is None)
    if memory is not None and recorded is not None and sent is not None:
        assert (memory.engine, memory.batch) == (1_000_000 * recorded, 1_000 * sent)
