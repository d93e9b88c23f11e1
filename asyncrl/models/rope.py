"""The rotary position embedding in ``config.json``.  Imports neither torch nor Megatron."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3's scaling: low frequencies are divided by ``factor``, high ones stay, with a smooth transition."""

    factor: float
    low_frequency: float
    """Frequencies whose wavelength is above ``original_positions`` divided by this are low."""
    high_frequency: float
    """Frequencies whose wavelength is below ``original_positions`` divided by this are high."""
    original_positions: int
    """The context length before the extension, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """YaRN (arXiv 2309.00071) in DeepSeek's form, which also changes the scale of the attention scores."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    """None: the scale of rotated queries and keys depends on ``factor`` alone."""
    mscale_all_dim: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotation of queries and keys by their positions."""

    theta: float
    fraction: float
    """The fraction of each head's dimensions that is rotated.  The others stay as they are."""
    scaling: Llama3Rope | YarnRope | None


def rope_of(config: Mapping[str, Any], supported: tuple[str, ...]) -> Rope:
    """Read the rotary embedding from a parsed ``config.json``.

    Until transformers 4, ``rope_theta`` was a separate key and ``rope_scaling`` had the rest.  Since transformers 5,
    ``rope_parameters`` has everything.  Raises ConfigError for a type that is not ``supported``, and KeyError for a
    missing number.
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
