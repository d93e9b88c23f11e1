"""Tiny checkpoints and batches for the tests of the trainer."""

import math
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.areas import ModelConfig, TrainConfig
from asyncrl.engines.megatron import TrainerSettings
from asyncrl.engines.megatron.rank import MegatronRank
from asyncrl.types import Batch, FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Span, Weights
from tests.ports import free_ports

VOCAB = 96
START = Weights(version=0, step=0)


def write_checkpoint(
    folder: Path, *, moe: bool = False, tied: bool = False, dtype: str = "float32", **shape: Any
) -> Path:
    """Write a random model whose norms and weights are so far from their initial values that errors show."""
    import transformers  # here, because the processes of tests import this module and write no checkpoint

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        **shape,
    }
    torch.manual_seed(0)
    if moe:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**experts, **settings}))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def trainer_settings(checkpoint: Path, *, lr: float = 1e-3, **changes: Any) -> TrainerSettings:
    """Settings of a trainer on the CPU; ``changes`` are fields of TrainerSettings or of TrainConfig."""
    settings = TrainerSettings(
        model=ModelConfig(hf_checkpoint=checkpoint),
        train=TrainConfig(lr=lr),
        device="cpu",
        dtype="float32",
        temperature=0.8,
        num_steps_per_rollout=1,
        use_rollout_logprobs=False,
        timeout_s=60.0,
    )
    own = {name: changes.pop(name) for name in list(changes) if hasattr(settings, name)}
    return replace(settings, train=replace(settings.train, **changes), **own)


@contextmanager
def one_rank(settings: TrainerSettings) -> Iterator[MegatronRank]:
    """A trainer of one rank in this process."""
    rank = MegatronRank(settings, 0, 1, "127.0.0.1", free_port())
    try:
        yield rank
    finally:
        rank.close()


def free_port() -> int:
    """A port without a listener now, outside the range of outgoing connections."""
    (port,) = free_ports(1)
    return port


def random_batch(*, groups: int = 4, group_size: int = 4, longest: int = 12, seed: int = 0, step: int = 0) -> Batch:
    """Prompts and answers of various lengths, some tokens masked, with log-probs near those of a random model."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(count))

    def scored(index: int) -> ScoredSample:
        length = rng.randint(1, longest)
        sample = Sample(
            index=index,
            token_ids=tokens(length),
            logprobs=array("f", [rng.uniform(-6.0, -3.0) for _ in range(length)]),
            spans=(Span(weights=START, start=0, stop=length),),
            text="",
            finish=FinishReason.STOP,
            seconds=1.0,
        )
        mask = tuple(int(rng.random() < 0.9) for _ in range(length))
        return ScoredSample(sample=sample, reward=float(rng.randrange(3)), loss_mask=mask)

    return Batch(
        step=step,
        groups=tuple(
            ScoredGroup(
                group_id=GroupId(number),
                prompt=Prompt(row=number, epoch=0, text="", token_ids=tokens(rng.randint(1, 9)), label=None),
                dispatched=START,
                samples=tuple(scored(index) for index in range(group_size)),
            )
            for number in range(groups)
        ),
    )


def poisoned(batch: Batch, number: int) -> Batch:
    """The batch with a NaN as the reward of the first answer of one group."""
    group = batch.groups[number]
    first = group.samples[0]
    scored = replace(first, reward=math.nan, loss_mask=(1,) * len(first.loss_mask))
    bad = replace(group, samples=(scored, *group.samples[1:]))
    return replace(batch, groups=(*batch.groups[:number], bad, *batch.groups[number + 1 :]))
