"""What ``config.json`` says about rotary positions.  Imports neither torch nor Megatron."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Slow frequencies divided by ``factor``, with a smooth passage to the fast ones, which stay."""

    factor: float
    low_frequency: float
    """Wavelengths over ``original_positions`` divided by this are slow."""
    high_frequency: float
    """Wavelengths under ``original_positions`` divided by this are fast."""
    original_positions: int
    """Length of the contexts before they were stretched, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """YaRN (arXiv 2309.00071), as DeepSeek has it: it also changes the scale of the attention scores."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    """None: rotated numbers are scaled by ``factor`` alone."""
    mscale_all_dim: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How positions turn queries and keys."""

    theta: float
    fraction: float
    """Of each head's numbers that are turned; the others stay as they are."""
    scaling: Llama3Rope | YarnRope | None


def rope_of(config: Mapping[str, Any], supported: tuple[str, ...]) -> Rope:
    """Raises ConfigError for a type that is not ``supported``, KeyError for a number that is missing.

    Until transformers 4 ``rope_theta`` stood by itself and the rest in ``rope_scaling``; from 5 on all are in
    ``rope_parameters``.
    """
    numbers = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = numbers.get("rope_type") or numbers.get("type") or "default"
    if kind not in supported:
        raise ConfigError(
            f"hf-checkpoint: cannot train with rope_type = {kind!r}, only {' or '.join(map(repr, supported))}"
        )
    theta = numbers["rope_theta"] if "rope_theta" in numbers else config["rope_theta"]
    fraction = numbers.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    scaling: Llama3Rope | YarnRope | None = None
    if kind == "llama3":
        scaling = _llama3(numbers)
    elif kind == "yarn":
        scaling = _yarn(numbers)
    return Rope(theta=float(theta), fraction=float(fraction), scaling=scaling)


def _llama3(numbers: Mapping[str, Any]) -> Llama3Rope:
    return Llama3Rope(
        factor=float(numbers["factor"]),
        low_frequency=float(numbers["low_freq_factor"]),
        high_frequency=float(numbers["high_freq_factor"]),
        original_positions=int(numbers["original_max_position_embeddings"]),
    )


def _yarn(numbers: Mapping[str, Any]) -> YarnRope:
    for key, value in (("attention_factor", None), ("truncate", True)):
        if numbers.get(key, value) != value:
            raise ConfigError(f"hf-checkpoint: cannot train with {key} = {numbers[key]!r} in yarn, only {value!r}")
    mscale, mscale_all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
    return YarnRope(
        factor=float(numbers["factor"]),
        original_positions=int(numbers["original_max_position_embeddings"]),
        beta_fast=float(numbers.get("beta_fast") or 32),  # defaults of transformers, from the paper
        beta_slow=float(numbers.get("beta_slow") or 1),
        mscale=float(mscale) if mscale and mscale_all_dim else None,
        mscale_all_dim=float(mscale_all_dim or 0),
    )
