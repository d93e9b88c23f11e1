"""The sizes of a training step on this rank: of its model's part, with its layout, dtype and device."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from asyncrl.config.areas import TrainConfig
from asyncrl.engines.megatron.model.attention import PackedAttention
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The sizes of attention on this rank."""

    num_heads: int
    num_kv_heads: int
    query_width: int
    value_width: int
    scale: float
    """The factor on the scores before the softmax."""
    context_rank: int = 0
    context_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """The sizes of the log-prob head on this rank."""

    vocab_size: int
    """The number of ids of this rank's part of the vocabulary."""
    temperature: float
    group: Any = None
    """The ranks that share the vocabulary; None: this rank has all of it."""

    @property
    def num_parts(self) -> int:
        """The number of ranks that share the vocabulary."""
        return 1 if self.group is None else int(self.group.size())

    @property
    def first(self) -> int:
        """The first id of this rank's part."""
        return 0 if self.group is None else int(self.group.rank()) * self.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """The sizes of a layer's experts on this rank."""

    num_experts: int
    num_chosen: int
    """The number of experts of each token, at most those of this rank."""
    ffn_hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes of a training step on this rank."""

    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    attention: AttentionSizes
    head: HeadSizes | None
    """None: another pipeline stage has the head."""
    experts: ExpertSizes | None
    train: TrainConfig

    @property
    def exact_dtype(self) -> torch.dtype:
        """The dtype of the plain forms."""
        return torch.float64 if self.dtype == torch.float32 else torch.float32

    def normal(self, *shape: int, seed: int, factor: float = 1.0, is_shared: bool = False) -> Tensor:
        """Draw random numbers with a separate generator, so that those of the training stay as they are.

        All ranks draw the same ``is_shared`` numbers, because a CPU draws them.
        """
        device = torch.device("cpu") if is_shared else self.device
        generator = torch.Generator(device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
        return drawn.mul_(factor).to(self.device)


def sizes_of(model: Any, shape: ModelShape, settings: TrainerSettings, device: torch.device) -> StepSizes:
    """Read the sizes from this rank's part of ``model`` and from Megatron's process groups."""
    tensor: Any = parallel_state.get_tensor_model_parallel_group()
    head = HeadSizes(
        vocab_size=shape.vocab_size // tensor.size(),
        temperature=settings.temperature,
        group=tensor if tensor.size() > 1 else None,
    )
    return StepSizes(
        device=device,
        dtype=getattr(torch, settings.dtype),
        hidden_size=shape.hidden_size,
        attention=_attention(model, shape, tensor.size()),
        head=head if parallel_state.is_pipeline_last_stage() else None,
        experts=_experts(shape),
        train=settings.train,
    )


def _attention(model: Any, shape: ModelShape, tensor_size: int) -> AttentionSizes:
    scale = next(module.scale for module in model.modules() if isinstance(module, PackedAttention))
    latent = shape.latent
    return AttentionSizes(
        num_heads=shape.num_heads // tensor_size,
        num_kv_heads=(shape.num_query_groups if latent is None else shape.num_heads) // tensor_size,
        query_width=shape.head_dim if latent is None else latent.plain_dim + latent.rotary_dim,
        value_width=shape.head_dim if latent is None else latent.value_dim,
        scale=scale,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
    )


def _experts(shape: ModelShape) -> ExpertSizes | None:
    if shape.experts is None:
        return None
    num_experts = shape.experts.num_experts // parallel_state.get_expert_model_parallel_world_size()
    return ExpertSizes(
        num_experts=num_experts,
        num_chosen=min(shape.experts.num_chosen, num_experts),
        ffn_hidden_size=shape.experts.ffn_hidden_size // parallel_state.get_expert_tensor_parallel_world_size(),
    )
