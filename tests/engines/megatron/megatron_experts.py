"""Megatron's own experts and dispatcher in a model, in place of asyncrl's."""

from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from asyncrl.engines.megatron.model.build import build_model
from asyncrl.models.shape import ModelShape


def plain_experts(num_local_experts: int, config: Any, groups: Any) -> Any:
    """Megatron's experts: one module, and two parameters, for each."""
    spec: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    return spec.keywords["submodules"].experts(num_local_experts, config, pg_collection=groups, name=None)


def make_plain(layer: Any) -> None:
    """Give the mixture ``layer`` Megatron's experts, with uninitialised weights, and Megatron's dispatcher."""
    weight, groups = layer.experts.weight1, get_default_pg_collection()
    layer.experts = plain_experts(layer.num_local_experts, layer.config, groups).to(weight.device, weight.dtype)
    layer.token_dispatcher = MoEAlltoAllTokenDispatcher(
        layer.num_local_experts, layer.local_expert_indices, config=layer.config, pg_collection=groups
    )


def build_plain(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Any:
    """Build the model as ``build_model`` does, with Megatron's experts."""
    model = build_model(shape, device, dtype)
    for module in model.modules():
        if isinstance(module, MoELayer):
            make_plain(module)
    return model
