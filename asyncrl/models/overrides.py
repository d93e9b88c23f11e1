"""Shape flags that override ``config.json``, in the run and in what it writes.  Imports neither torch nor Megatron.

config.json ──▶ read_shape ──▶ overridden ──▶ the run's ModelShape ──▶ changes: a saved model's config.json
                                                                 └───▶ server_changes: the rollout engines'
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from asyncrl.config.areas.ranges import flag, must, refuse
from asyncrl.config.areas.shape_flags import ShapeConfig
from asyncrl.models.families import FAMILIES
from asyncrl.models.shape import ModelShape, shape_of


def overridden(shape: ModelShape, given: ShapeConfig) -> ModelShape:
    """Return ``shape`` with the values that are ``given``.

    Raises ConfigError, with one line for each value that does not fit the checkpoint.
    """
    theirs = _numbers(shape)
    wanted = {field.name: getattr(given, field.name) for field in fields(given)}
    different = {name: value for name, value in wanted.items() if value is not None and value != theirs[name]}
    refuse(line for name, value in different.items() for line in _problems(shape, name, value, theirs[name]))
    rope = replace(
        shape.rope,
        theta=different.get("rotary_base", shape.rope.theta),
        fraction=different.get("rotary_percent", shape.rope.fraction),
    )
    return replace(
        shape,
        rope=rope,
        norm_eps=different.get("norm_epsilon", shape.norm_eps),
        max_positions=different.get("max_position_embeddings", shape.max_positions),
    )


def changes(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a parsed ``config.json`` that must change so that it describes ``shape``.

    ``overridden`` made ``shape`` from the shape of ``config``.
    """
    before, found = shape_of(config), dict[str, Any]()
    if shape.max_positions != before.max_positions:
        found[_key(shape, "max_positions")] = shape.max_positions
    if shape.norm_eps != before.norm_eps:
        found[_key(shape, "norm_eps")] = shape.norm_eps
    rotary_changes: dict[str, Any] = {}
    if shape.rope.theta != before.rope.theta:
        rotary_changes["rope_theta"] = shape.rope.theta
    if shape.rope.fraction != before.rope.fraction:
        rotary_changes["partial_rotary_factor"] = shape.rope.fraction
    for place in ("rope_scaling", "rope_parameters"):  # transformers 4 and 5
        inner = config.get(place) or {}
        if again := {key: value for key, value in rotary_changes.items() if key in inner}:
            found[place] = {**inner, **again}
    return found | rotary_changes


def server_changes(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the same changes for an engine that has read ``config``, as attributes of transformers' configuration.

    SGLang 0.5.16 reads all rotary parameters from ``rope_parameters``.
    """
    found = changes(config, shape)
    if shape.rope == shape_of(config).rope:
        return found
    scaling, parameters = (found.pop(place, config.get(place)) or {} for place in ("rope_scaling", "rope_parameters"))
    numbers = {**scaling, **parameters, "rope_theta": shape.rope.theta}
    if shape.rope.fraction != 1.0:
        numbers["partial_rotary_factor"] = shape.rope.fraction
    numbers["rope_type"] = numbers.get("rope_type") or numbers.get("type") or "default"
    return {**found, "rope_parameters": numbers}


def _numbers(shape: ModelShape) -> dict[str, float]:
    """Return the values in ``shape`` that flags can set, by the flag's field."""
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.latent.plain_dim if shape.latent else shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rotary_base": shape.rope.theta,
        "rotary_percent": shape.rope.fraction,
        "norm_epsilon": shape.norm_eps,
    }


_FREE = frozenset({"max_position_embeddings", "rotary_base", "rotary_percent", "norm_epsilon"})
"""Fields of the flags that no tensor depends on."""


def _problems(shape: ModelShape, name: str, value: float, theirs: float) -> list[str]:
    said = f"{flag(name)} {value}: config.json says {theirs}"
    if name == "kv_channels" and shape.latent is not None and value == shape.latent.rotary_dim:
        return []  # Megatron's latent attention does not read it, and scripts for Kimi K2 give this number
    if name not in _FREE:
        return [f"{said}, and the checkpoint's tensors have that size"]
    rotates_partly = shape.rope.fraction != 1.0
    return must(
        name != "rotary_percent" or rotates_partly, f"{said}: {shape.architecture} always rotates whole heads"
    ) + must(
        name != "norm_epsilon" or shape.latent is None,
        f"{said}, and engines would also use it within latent attention, where the trainer does not",
    )


def _key(shape: ModelShape, field: str) -> str:
    return FAMILIES[shape.architecture].keys[field]
