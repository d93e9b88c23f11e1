"""The layers that a model is made of, Megatron's local ones or TransformerEngine's, and the names of their norms.

TransformerEngine fuses a norm with the linear layer that follows it.  The code uses the parameter names of the local
layers for both implementations (``unfused``).  Checkpoints are written with the names of TransformerEngine's layers
(``norm_keys``), with which Megatron-LM and slime run.
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
"""Norms of models with latent attention, whose layers are always local here."""


def with_implementation(
    settings: TrainerSettings, *, has_layers: bool = HAVE_TE, has_adam: bool = not USING_PYTORCH_OPTIMIZER
) -> TrainerSettings:
    """Replace a ``transformer_impl`` of auto in ``settings`` by the layers to use.

    Raises ConfigError if TransformerEngine is requested but missing, or if Megatron would use a GPU's Adam on a CPU.
    """
    if settings.device == "cpu" and has_adam:
        raise ConfigError(
            "device cpu: TransformerEngine or Apex is installed, and Megatron would use its Adam, which needs a GPU; "
            "uninstall it, or train on a GPU"
        )
    layers = settings.model.transformer_impl
    if layers == "transformer_engine" and not has_layers:
        raise ConfigError(
            "transformer-impl transformer_engine: TransformerEngine cannot be imported on the trainer's machine; "
            "install it, or set transformer-impl to local"
        )
    if layers == "auto":
        layers = "transformer_engine" if has_layers and _suits(settings) else "local"
    return replace(settings, model=replace(settings.model, transformer_impl=layers))


def check_alike(settings: TrainerSettings) -> None:
    """Raise ConfigError unless all ranks use the same layers.  Collective."""
    layers = of_every_rank(settings.model.transformer_impl)
    if len(set(layers)) > 1:
        without = ", ".join(str(rank) for rank, each in enumerate(layers) if each == "local")
        raise ConfigError(
            f"transformer-impl auto: TransformerEngine cannot be imported on ranks {without}, but can be on "
            "others; install it on all, or set transformer-impl to local"
        )


def _suits(settings: TrainerSettings) -> bool:
    """Return whether TransformerEngine's layers suit the settings.

    They may round float32 products to TF32, so they are used for bfloat16 only.
    """
    can_recompute = "layernorm" not in settings.parallel.recompute_modules
    return settings.device == "cuda" and settings.dtype == "bfloat16" and can_recompute


def unfused(name: str) -> str:
    """Translate the name of a weight in TransformerEngine's layers to its name in the local layers."""
    for plain, fused in (_BEFORE_ATTENTION | _BEFORE_MLP).items():
        name = name.replace(fused, plain)
    return name


def norm_keys(*, has_experts: bool, is_latent: bool) -> dict[str, str]:
    """Map the norm names of a local layer to their names in checkpoints.

    The norm before experts keeps its plain name, as it does in TransformerEngine's layers.  Megatron's map would give
    it the fused name.
    """
    before_attention = _WITHIN_LATENT_ATTENTION if is_latent else _BEFORE_ATTENTION
    return before_attention | ({} if has_experts else _BEFORE_MLP)
