"""Whose layers a model is made of: Megatron's own, or TransformerEngine's."""

from typing import Literal

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER

from asyncrl.errors import ConfigError

type Implementation = Literal["local", "transformer_engine"]


def check_installed(
    layers: Implementation, device: str, *, has_layers: bool = HAVE_TE, has_adam: bool = not USING_PYTORCH_OPTIMIZER
) -> None:
    """Raise ConfigError unless this machine has what it takes."""
    if device == "cpu" and has_adam:
        raise ConfigError(
            "device cpu: TransformerEngine or Apex is installed: Megatron takes its Adam wherever it is; it needs a GPU"
        )
    if layers == "transformer_engine" and not has_layers:
        raise ConfigError("transformer-impl transformer_engine: it cannot be imported on the trainer's machine")
