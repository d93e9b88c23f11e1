"""Whose layers a model is made of, Megatron's own or TransformerEngine's, and what their norms are called.

TransformerEngine has a norm within the product that follows it.  Parameters are called as in Megatron's own layers,
whichever they are of (``unfused``); checkpoints are written as with TransformerEngine's (``norm_keys``), with which
Megatron-LM and slime run.
"""

from dataclasses import replace

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER

from asyncrl.engines.megatron.setup.ranks import of_every_rank
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.errors import ConfigError
from asyncrl.internals import Internal

INTERNALS = (
    Internal(name="megatron.core.extensions.transformer_engine.HAVE_TE", used_in=__name__),
    Internal(name="megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

_BEFORE_ATTENTION = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_BEFORE_MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_WITHIN_LATENT_ATTENTION = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Of models with latent attention, whose layers are always Megatron's own here."""


def with_implementation(
    settings: TrainerSettings, *, has_layers: bool = HAVE_TE, has_adam: bool = not USING_PYTORCH_OPTIMIZER
) -> TrainerSettings:
    """``settings`` without auto for the layers.  Raises ConfigError unless this machine has what it takes."""
    if settings.device == "cpu" and has_adam:
        raise ConfigError(
            "device cpu: TransformerEngine or Apex is installed: Megatron takes its Adam wherever it is; it needs a GPU"
        )
    layers = settings.model.transformer_impl
    if layers == "transformer_engine" and not has_layers:
        raise ConfigError("transformer-impl transformer_engine: it cannot be imported on the trainer's machine")
    if layers == "auto":
        layers = "transformer_engine" if has_layers and _suits(settings) else "local"
    return replace(settings, model=replace(settings.model, transformer_impl=layers))


def check_alike(settings: TrainerSettings) -> None:
    """Raise ConfigError if other ranks have other layers.  Collective."""
    layers = of_every_rank(settings.model.transformer_impl)
    if len(set(layers)) > 1:
        without = ", ".join(str(rank) for rank, each in enumerate(layers) if each == "local")
        raise ConfigError(
            f"transformer-impl auto: TransformerEngine cannot be imported on ranks {without}, but on others; "
            "install it on all, or say local"
        )


def _suits(settings: TrainerSettings) -> bool:
    """Whether TransformerEngine's layers do what is asked; products in float32 may be rounded to TF32 in them."""
    can_recompute = "layernorm" not in settings.parallel.recompute_modules
    return settings.device == "cuda" and settings.dtype == "bfloat16" and can_recompute


def unfused(name: str) -> str:
    """TransformerEngine's name of a weight as Megatron's own layers call it."""
    for plain, fused in (_BEFORE_ATTENTION | _BEFORE_MLP).items():
        name = name.replace(fused, plain)
    return name


def norm_keys(*, has_experts: bool, is_latent: bool) -> dict[str, str]:
    """What checkpoints call the norms of one of Megatron's own layers.

    Before experts it is the plain name with TransformerEngine's layers, too; Megatron's own map has the fused one.
    """
    before_attention = _WITHIN_LATENT_ATTENTION if is_latent else _BEFORE_ATTENTION
    return before_attention | ({} if has_experts else _BEFORE_MLP)
