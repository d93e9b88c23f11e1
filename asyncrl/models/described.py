"""The comparison of Megatron's flags that describe a model with its ``config.json``.  They change nothing.

``overrides`` has the flags that change the shape, or that tensors' sizes depend on and have a setting.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.areas import FlagWords
from asyncrl.config.slime.accepted import is_same, written
from asyncrl.models.rope import Llama3Rope, YarnRope
from asyncrl.models.shape import ModelShape


def otherwise(config: Mapping[str, Any], shape: ModelShape, given: Mapping[str, FlagWords]) -> list[str]:
    """One line for each flag in ``given`` that describes another model than the parsed ``config`` with ``shape``.

    Flags that describe no model are passed over.
    """
    return [line for name, value in given.items() for line in _line(config, shape, name, value)]


def _line(config: Mapping[str, Any], shape: ModelShape, name: str, value: FlagWords) -> list[str]:
    said = f"{written(name, value)}: {shape.architecture}"
    if name in _FEATURES:
        return [] if _FEATURES[name](config, shape) else [f"{said} has no such thing by its config.json; leave it out"]
    if name == "spec":
        fits = isinstance(value, tuple) and _SPECS.get(value) == shape.architecture
        return [] if fits else [f"{said} decides the layers; leave it out"]
    if name == "moe-layer-freq":
        return _layers(shape, said, str(value))
    if name not in _VALUES:
        return []
    theirs = _VALUES[name](config, shape)
    if theirs is None:
        return [f"{said} has nothing of the kind; leave it out"]
    return [] if is_same(str(value), str(theirs)) else [f"{said} has {theirs} by its config.json; leave it out"]


def _layers(shape: ModelShape, said: str, value: str) -> list[str]:
    """Compare the layers with experts, in Megatron's notation: ``[0]*3+[1]*58``, or 2 for every second layer."""
    if shape.experts is None:
        return [f"{said} has no experts; leave it out"]
    dense = min(shape.experts.num_dense_layers, shape.num_layers)
    if _pattern(value, shape.num_layers) == [0] * dense + [1] * (shape.num_layers - dense):
        return []
    theirs = f"[0]*{dense}+[1]*{shape.num_layers - dense}"
    return [f"{said} has {theirs} by its config.json; leave it out"]


def _pattern(text: str, num_layers: int) -> list[int] | None:
    """1 for each layer with experts, 0 for the others; None if ``text`` is not in Megatron's notation."""
    if text.isdigit() and int(text) > 0:
        return [int(layer % int(text) == 0) for layer in range(num_layers)]
    found: list[int] = []
    for part in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"\(?\[([01](?:,[01])*),?\](?:\*(\d{1,4}))?\)?", part)
        if match is None:
            return None
        found += [int(word) for word in match[1].split(",")] * int(match[2] or 1)
    return found


def _has_gated_silu(config: Mapping[str, Any], shape: ModelShape) -> bool:
    return bool(config.get("hidden_act", "silu") == "silu")


def _softmax_is_first(config: Mapping[str, Any], shape: ModelShape) -> bool:
    """Whether the weights of the chosen experts are those of a softmax over all experts, or of no softmax."""
    return shape.experts is not None and (shape.experts.scores == "sigmoid" or not shape.experts.weights_add_to_one)


def _always(config: Mapping[str, Any], shape: ModelShape) -> bool:
    return True


_FEATURES: Mapping[str, Callable[[Mapping[str, Any], ModelShape], bool]] = {
    "swiglu": _has_gated_silu,
    "use-rotary-position-embeddings": _always,
    "no-position-embedding": _always,
    "disable-bias-linear": _always,
    "group-query-attention": lambda _, shape: shape.latent is None,
    # Megatron's latent attention does not read it, and slime's script for GLM-4.7-Flash gives it.
    "add-qkv-bias": lambda _, shape: shape.has_qkv_bias or shape.latent is not None,
    "qk-layernorm": lambda _, shape: shape.has_qk_norms or shape.latent is not None,
    "untie-embeddings-and-output-weights": lambda _, shape: not shape.ties_embeddings,
    "multi-latent-attention": lambda _, shape: shape.latent is not None,
    "post-self-attn-layernorm": lambda _, shape: shape.has_output_norms,
    "post-mlp-layernorm": lambda _, shape: shape.has_output_norms,
    "rotary-interleaved": lambda _, shape: shape.interleaves_rope,
    "use-rope-scaling": lambda _, shape: isinstance(shape.rope.scaling, Llama3Rope),
    "moe-router-pre-softmax": _softmax_is_first,
    "moe-router-enable-expert-bias": lambda _, shape: shape.experts is not None and shape.experts.has_bias,
}
"""Whether a model has what a flag without a value says."""


def _of_yarn(key: str) -> Callable[[Mapping[str, Any], ModelShape], Any]:
    """The number under ``key`` of a model with YaRN, whose effect needs a factor above 1."""

    def read(config: Mapping[str, Any], shape: ModelShape) -> Any:
        numbers = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        return numbers.get(key) if isinstance(shape.rope.scaling, YarnRope) else 1.0

    return read


def _scaling_factor(config: Mapping[str, Any], shape: ModelShape) -> float:
    return 1.0 if shape.rope.scaling is None else shape.rope.scaling.factor


def _shared(config: Mapping[str, Any], shape: ModelShape) -> int | None:
    return shape.experts.num_shared * shape.experts.ffn_hidden_size or None if shape.experts else None


_VALUES: Mapping[str, Callable[[Mapping[str, Any], ModelShape], Any]] = {
    "position-embedding-type": lambda *_: "rope",
    "normalization": lambda *_: "RMSNorm",
    "vocab-size": lambda _, shape: shape.vocab_size,
    "num-experts": lambda _, shape: shape.experts and shape.experts.num_experts,
    "moe-ffn-hidden-size": lambda _, shape: shape.experts and shape.experts.ffn_hidden_size,
    "moe-shared-expert-intermediate-size": _shared,
    "moe-router-topk": lambda _, shape: shape.experts and shape.experts.num_chosen,
    "moe-router-score-function": lambda _, shape: shape.experts and shape.experts.scores,
    "moe-router-num-groups": lambda _, shape: shape.experts and shape.experts.num_groups,
    "moe-router-group-topk": lambda _, shape: shape.experts and shape.experts.num_chosen_groups,
    "moe-router-topk-scaling-factor": lambda _, shape: shape.experts and shape.experts.weight_scale,
    "q-lora-rank": lambda _, shape: shape.latent and shape.latent.query_rank,
    "kv-lora-rank": lambda _, shape: shape.latent and shape.latent.key_value_rank,
    "qk-head-dim": lambda _, shape: shape.latent and shape.latent.plain_dim,
    "qk-pos-emb-head-dim": lambda _, shape: shape.latent and shape.latent.rotary_dim,
    "v-head-dim": lambda _, shape: shape.latent and shape.latent.value_dim,
    "rotary-scaling-factor": _scaling_factor,
    "mscale": _of_yarn("mscale"),
    "mscale-all-dim": _of_yarn("mscale_all_dim"),
}
"""The value of a model for a flag with a value; None if the model has nothing of the kind."""

_SPECS: Mapping[tuple[str, ...], str] = {("slime_plugins.models.glm4", "get_glm_spec"): "Glm4ForCausalLM"}
"""The architecture whose layers a ``--spec`` of slime builds."""

COMPARED = frozenset({*_FEATURES, *_VALUES, "spec", "moe-layer-freq"})
"""The flags that are compared.  A test holds them against the table of slime's flags."""
