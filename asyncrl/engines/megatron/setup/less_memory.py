"""Settings with which a step needs less memory and more time.  Imports neither torch nor Megatron."""

from dataclasses import replace

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.derived import use_dynamic_batch_size
from asyncrl.engines.megatron.setup.settings import TrainerSettings

FEWEST_TOKENS = 1024
"""A microbatch is not halved below this: weights, not activations, have the memory then."""


def less_memory(settings: TrainerSettings) -> tuple[TrainerSettings, str] | None:
    """Return settings for less memory, and the flags that stand for them; None if nothing more can be saved.

    Whole layers are recomputed, and microbatches have half the size.  Sums of gradients are rounded in another order.
    """
    model, train, parallel, flags = settings.model, settings.train, settings.parallel, list[str]()
    if parallel.recomputes != "full" or parallel.recompute_method == "block":
        if "layernorm" in parallel.recompute_modules and model.transformer_impl == "auto":
            model = replace(model, transformer_impl="local")  # as auto has chosen for these modules
        flags.append(_full_recomputation(parallel))
        parallel = replace(
            parallel,
            recompute_granularity="full",
            recompute_activations=False,
            recompute_method=None,
            recompute_num_layers=None,
            recompute_modules=(),
        )
    if not use_dynamic_batch_size(train):
        if (size := train.micro_batch_size or 1) > 1:
            train = replace(train, micro_batch_size=size // 2)
            flags.append(f"micro-batch-size {size // 2}")
    elif (tokens := train.max_tokens_per_gpu // 2) >= FEWEST_TOKENS:
        train = replace(train, max_tokens_per_gpu=tokens)
        flags.append(f"max-tokens-per-gpu {tokens}")
    return (replace(settings, model=model, train=train, parallel=parallel), ", ".join(flags)) if flags else None


def _full_recomputation(parallel: ParallelConfig) -> str:
    """Return the flag, with the names of given flags that it excludes."""
    given = {
        "recompute-activations": parallel.recompute_activations,
        "recompute-modules": parallel.recompute_modules,
        "recompute-method": parallel.recompute_method,
        "recompute-num-layers": parallel.recompute_num_layers,
    }
    out = " and ".join(name for name, value in given.items() if value)
    return f"recompute-granularity full{f' (without {out})' if out else ''}"
