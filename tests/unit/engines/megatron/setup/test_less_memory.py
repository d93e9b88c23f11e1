"""Settings for less memory save what they can, and tell the flags that stand for them."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.areas import ModelConfig, TrainConfig
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.setup.less_memory import less_memory
from asyncrl.engines.megatron.setup.settings import TrainerSettings

FULL = {"recompute_granularity": "full"}


def settings(parallel: dict[str, Any], **train: Any) -> TrainerSettings:
    return TrainerSettings(
        model=ModelConfig(hf_checkpoint=Path("model")),
        train=TrainConfig(**train),
        parallel=ParallelConfig(**parallel),
        device="cuda",
        dtype="bfloat16",
        temperature=1.0,
        num_steps_per_rollout=1,
        use_rollout_logprobs=True,
        timeout_s=60.0,
    )


@pytest.mark.parametrize(
    ("parallel", "train", "flags"),
    [
        ({}, {"max_tokens_per_gpu": 8192}, "recompute-granularity full, max-tokens-per-gpu 4096"),
        (
            {"recompute_activations": True},
            {"max_tokens_per_gpu": 1024},
            "recompute-granularity full (without recompute-activations)",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("moe", "layernorm")},
            {"micro_batch_size": 3},
            "recompute-granularity full (without recompute-modules), micro-batch-size 1",
        ),
        (
            {**FULL, "recompute_method": "block", "recompute_num_layers": 4},
            {"use_dynamic_batch_size": False},
            "recompute-granularity full (without recompute-method and recompute-num-layers)",
        ),
        ({**FULL, "recompute_num_layers": 2}, {"max_tokens_per_gpu": 3000}, "max-tokens-per-gpu 1500"),
    ],
)
def test_layers_are_recomputed_and_microbatches_are_halved(
    parallel: dict[str, Any], train: dict[str, Any], flags: str
) -> None:
    found = less_memory(settings(parallel, **train))
    assert found is not None
    less, said = found
    assert said == flags
    assert less.parallel.recomputes == "full"
    assert less.parallel.recompute_method in (None, "uniform")
    assert (less.model.transformer_impl == "local") is ("layernorm" in str(parallel))
    again = less_memory(less)
    assert again is None or "recompute" not in again[1]


@pytest.mark.parametrize("train", [{"max_tokens_per_gpu": 2047}, {"micro_batch_size": 1}])
def test_nothing_more_can_be_saved_in_the_end(train: dict[str, Any]) -> None:
    assert less_memory(settings(FULL, **train)) is None
