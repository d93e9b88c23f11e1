"""The shape of a model in a checkpoint's ``config.json``.  Imports neither torch nor Megatron: it runs first."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import ConfigError
from asyncrl.models.families import FAMILIES, Family
from asyncrl.models.rope import Rope, rope_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The mixture of experts of every layer except the first few."""

    num_experts: int
    num_chosen: int
    """The number of experts that process each token."""
    ffn_hidden_size: int
    weights_add_to_one: bool
    """Whether the weights of the chosen experts are rescaled to sum to 1."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function that maps the router's logits to weights."""
    has_bias: bool = False
    """Whether the choice of experts uses a bias.  The bias has no other effect."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """The number of expert groups from which each token's experts are chosen."""
    weight_scale: float = 1.0
    """The factor on the weights, after they are rescaled to sum to 1."""
    num_shared: int = 0
    """The number of shared experts, which process every token: in effect one expert, ``num_shared`` times as wide."""
    num_dense_layers: int = 0
    """The number of layers at the start that have no experts."""

    def __post_init__(self) -> None:
        if self.num_groups > 1 and self.num_chosen // self.num_chosen_groups != 2:
            # The models rank groups by their two best experts, Megatron by their num_chosen // num_chosen_groups best.
            raise ConfigError(
                f"hf-checkpoint: cannot train with num_experts_per_tok = {self.num_chosen} from topk_group = "
                f"{self.num_chosen_groups} groups, only with two experts for each group"
            )
        if self.scores == "sigmoid" and self.num_chosen < 2:  # Megatron would not rescale a single weight
            raise ConfigError("hf-checkpoint: cannot train with num_experts_per_tok = 1 and sigmoid scores")
        if self.weights_add_to_one and self.num_chosen < 2:  # Megatron refuses a softmax over a single logit
            raise ConfigError("hf-checkpoint: cannot train with num_experts_per_tok = 1 and norm_topk_prob = True")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): keys and values come from a narrow latent vector."""

    query_rank: int | None
    """The rank of the query projection; None: queries come directly from the hidden state."""
    key_value_rank: int
    plain_dim: int
    """The dimensions of a query or key head that are not rotated."""
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a decoder-only transformer, under the same names for every family."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    """The number of KV heads."""
    head_dim: int
    """The dimension of a head; without meaning if ``latent`` is set."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    ties_embeddings: bool
    """Whether the output layer's weight is the embedding's."""
    dtype: str
    """The dtype of the tensors in the checkpoint, in torch's name without ``torch.``."""
    fp8_block: tuple[int, int] | None
    """Rows and columns that share a scale in FP8 tensors, whose dequantized dtype is ``dtype``; None without FP8."""
    num_next_token_layers: int
    """The number of layers for multi-token prediction behind the last layer.  They are not trained."""
    interleaves_rope: bool = False
    """Whether the rotation pairs neighbouring dimensions, instead of dimensions half a head apart."""
    has_qkv_bias: bool = False
    has_qk_norms: bool = False
    """Whether each head's query and key are normalized."""
    has_output_norms: bool = False
    """Whether the outputs of attention and MLP are normalized before they are added."""
    experts: ExpertShape | None
    latent: LatentShape | None


def read_shape(checkpoint: Path) -> ModelShape:
    """Return the shape of the model in ``checkpoint``, a folder in Hugging Face format.  Raises ConfigError."""
    return shape_of(read_config(checkpoint))


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` in ``checkpoint``.  Raises ConfigError."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"hf-checkpoint: no {path}; give a local folder in Hugging Face format") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf-checkpoint: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"hf-checkpoint: {path} is not a JSON object")
    return config


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a parsed ``config.json`` describes.  Raises ConfigError."""
    name = (config.get("architectures") or [None])[0]
    if name is None:
        raise ConfigError(f"hf-checkpoint: config.json names no architectures; supported: {', '.join(FAMILIES)}")
    if name not in FAMILIES:
        raise ConfigError(f"hf-checkpoint: cannot train {name}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    for key, value in family.only.items():
        if config.get(key, value) != value:
            raise ConfigError(f"hf-checkpoint: cannot train {name} with {key} = {config[key]!r}, only {value!r}")
    try:
        given = {key: it for key, it in config.items() if it is not None}
        return _shape(name, family, {**family.absent, **given, **_dense_layers(name, given)})
    except KeyError as error:
        raise ConfigError(f"hf-checkpoint: config.json of {name} has no {error}") from error


def _shape(name: str, family: Family, config: Mapping[str, Any]) -> ModelShape:
    fields = {**family.always, **_fields(config, family.keys)}
    if fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // fields["num_heads"]
    experts = ExpertShape(**family.expert_always, **_fields(config, family.expert_keys)) if family.expert_keys else None
    return ModelShape(
        architecture=name,
        **fields,
        rope=rope_of(config, family.rope_types),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        fp8_block=_fp8_block(config),
        num_next_token_layers=config.get("num_nextn_predict_layers", 0),
        experts=experts,
        latent=LatentShape(**_fields(config, family.latent_keys)) if family.latent_keys else None,
    )


def _dense_layers(name: str, config: Mapping[str, Any]) -> dict[str, int]:
    """Return ``first_k_dense_replace`` as ``mlp_layer_types`` gives it, where transformers 5 wrote the latter."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return {}
    count = kinds.count("dense")
    if kinds != ["dense"] * count + ["sparse"] * (len(kinds) - count) or len(kinds) != config["num_hidden_layers"]:
        raise ConfigError(
            f"hf-checkpoint: cannot train {name} with mlp_layer_types = {kinds!r}, only one entry for each layer, with "
            "all dense layers first"
        )
    if config.get("first_k_dense_replace", count) != count:
        raise ConfigError(
            f"hf-checkpoint: config.json of {name} has first_k_dense_replace = {config['first_k_dense_replace']}, but "
            f"{count} dense layers in mlp_layer_types"
        )
    return {"first_k_dense_replace": count}


def _fields(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return each field's value under the first of its keys that is present.  Raises KeyError if none is."""
    found = {}
    for field, names in keys.items():
        present = [key for key in names.split("|") if key in config]
        if not present:
            raise KeyError(names)
        found[field] = config[present[0]]
    return found


def _fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not block:
        raise ConfigError(f"hf-checkpoint: cannot train from quant_method = {method!r}, only 'fp8' in blocks")
    return int(block[0]), int(block[1])
