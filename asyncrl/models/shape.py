"""What a checkpoint's ``config.json`` says about the model.  Imports neither torch nor Megatron: it runs first."""

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
    """The mixture of experts of every layer but the first few."""

    num_experts: int
    num_chosen: int
    """Experts that each token goes to."""
    ffn_hidden_size: int
    weights_add_to_one: bool
    """Whether the weights of the chosen experts are rescaled to add up to 1."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes weights of the router's logits."""
    has_bias: bool = False
    """Whether a bias takes part in choosing the experts, and in nothing else."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Groups of experts that each token's experts come from."""
    weight_scale: float = 1.0
    """Factor on the weights, after they add up to 1."""
    num_shared: int = 0
    """Experts that every token goes to: in effect one, ``num_shared`` times as wide."""
    num_dense_layers: int = 0
    """Layers at the beginning that have no experts."""

    def __post_init__(self) -> None:
        if self.num_groups > 1 and self.num_chosen // self.num_chosen_groups != 2:
            # Groups compete by their two best experts; Megatron takes num_chosen // num_chosen_groups of them.
            raise ConfigError(
                f"hf-checkpoint: cannot train with num_experts_per_tok = {self.num_chosen} from topk_group = "
                f"{self.num_chosen_groups} groups, only two for each group"
            )
        if self.scores == "sigmoid" and self.num_chosen < 2:  # Megatron would not rescale a single weight
            raise ConfigError("hf-checkpoint: cannot train with num_experts_per_tok = 1 and sigmoid scores")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): keys and values through a narrow vector."""

    query_rank: int | None
    """None: queries come straight from the hidden state."""
    key_value_rank: int
    plain_dim: int
    """Numbers of a query or key head that positions do not turn."""
    rotary_dim: int
    value_dim: int


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
    """Without meaning where ``latent`` is there."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    ties_embeddings: bool
    """Whether the output layer is the embedding."""
    dtype: str
    """Of the tensors in the checkpoint, as torch names it without ``torch.``."""
    fp8_block: tuple[int, int] | None
    """Rows and columns that share a scale where tensors are in fp8; ``dtype`` is then what they stand for."""
    num_next_token_layers: int
    """Layers behind the last that predict further tokens; they are not trained."""
    interleaves_rope: bool = False
    """Whether positions turn neighbouring numbers, instead of numbers half a head apart."""
    has_qkv_bias: bool = False
    has_qk_norms: bool = False
    """Whether each head's query and key are normalised."""
    has_output_norms: bool = False
    """Whether the outputs of attention and MLP are normalised before they are added."""
    experts: ExpertShape | None
    latent: LatentShape | None


def read_shape(checkpoint: Path) -> ModelShape:
    """The shape of the model in ``checkpoint``, a folder in Hugging Face format.  Raises ConfigError."""
    return shape_of(read_config(checkpoint))


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The parsed ``config.json`` in ``checkpoint``.  Raises ConfigError."""
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
    """The shape that a parsed ``config.json`` describes.  Raises ConfigError."""
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
        return _shape(name, family, {**family.absent, **{key: it for key, it in config.items() if it is not None}})
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


def _fields(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Of each field's keys the first that is there."""
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
