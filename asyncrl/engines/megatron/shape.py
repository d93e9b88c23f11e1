"""What a checkpoint's ``config.json`` says about the model.  Imports neither torch nor Megatron: it runs first."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The mixture of experts of every layer."""

    num_experts: int
    num_chosen: int
    """Experts that each token goes to."""
    ffn_hidden_size: int
    weights_add_to_one: bool
    """Whether the weights of the chosen experts are rescaled to add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer, in our words."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    """Heads of keys and values."""
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    ties_embeddings: bool
    """Whether the output layer is the embedding."""
    dtype: str
    """Of the tensors in the checkpoint, as torch names it without ``torch.``."""
    experts: ExpertShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Where an architecture keeps its numbers, and what we cannot train."""

    keys: Mapping[str, str]
    """Field of ModelShape to key of config.json; of keys with ``|`` between them, the first that is there."""
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    """Field of ExpertShape to key of config.json; empty for a dense model."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change the mathematics, with the one value that is supported; an absent key has it."""


_QWEN3_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "ties_embeddings": "tie_word_embeddings",
}
_QWEN3_ONLY = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "rope_scaling": None}

ARCHITECTURES: Mapping[str, Architecture] = {
    "Qwen3ForCausalLM": Architecture(keys=_QWEN3_KEYS, only=_QWEN3_ONLY),
    "Qwen3MoeForCausalLM": Architecture(
        keys=_QWEN3_KEYS,
        expert_keys={
            "num_experts": "num_experts|num_local_experts",  # before transformers 5, and since
            "num_chosen": "num_experts_per_tok",
            "ffn_hidden_size": "moe_intermediate_size",
            "weights_add_to_one": "norm_topk_prob",
        },
        only={**_QWEN3_ONLY, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}


def check_architecture(checkpoint: Path) -> None:
    """Raise ConfigError unless we can train the model in ``checkpoint``."""
    read_shape(checkpoint)


def read_shape(checkpoint: Path) -> ModelShape:
    """The shape of the model in ``checkpoint``, a folder in Hugging Face format.  Raises ConfigError."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf-checkpoint: cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"hf-checkpoint: {path} is not a JSON object")
    return shape_of(config)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a parsed ``config.json`` describes.  Raises ConfigError."""
    name = (config.get("architectures") or ["none"])[0]
    if name not in ARCHITECTURES:
        raise ConfigError(f"hf-checkpoint: cannot train {name}; supported: {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    for key, value in architecture.only.items():
        if config.get(key, value) != value:
            raise ConfigError(f"hf-checkpoint: cannot train {name} with {key} = {config[key]!r}, only {value!r}")
    try:
        experts = {name: _first(config, keys) for name, keys in architecture.expert_keys.items()}
        return ModelShape(
            architecture=name,
            **{name: _first(config, keys) for name, keys in architecture.keys.items()},
            rope_theta=_rope_theta(config),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            experts=ExpertShape(**experts) if experts else None,
        )
    except KeyError as error:
        raise ConfigError(f"hf-checkpoint: config.json of {name} has no {error}") from error


def _first(config: Mapping[str, Any], keys: str) -> Any:
    for key in keys.split("|"):
        if key in config:
            return config[key]
    raise KeyError(keys)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Until transformers 4 a key of its own, from 5 on one of ``rope_parameters``."""
    parameters = config.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default":
        raise ConfigError(f"hf-checkpoint: cannot train with rope_type = {parameters['rope_type']!r}, only 'default'")
    return float(parameters["rope_theta"] if "rope_theta" in parameters else config["rope_theta"])
