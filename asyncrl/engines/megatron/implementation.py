"""Whose layers a model is made of: Megatron's own, or TransformerEngine's."""

from typing import Literal

from megatron.core.extensions.transformer_engine import HAVE_TE

from asyncrl.errors import ConfigError

type Implementation = Literal["local", "transformer_engine"]


def check_installed(layers: Implementation, device: str) -> None:
    """Raise ConfigError unless this machine has what it takes."""
    if device == "cpu" and HAVE_TE:
        raise ConfigError(
            "device cpu: TransformerEngine is installed; Megatron takes its Adam wherever it is, and that needs a GPU"
        )
    if layers == "transformer_engine" and not HAVE_TE:
        raise ConfigError("transformer-impl transformer_engine: it cannot be imported on the trainer's machine")
