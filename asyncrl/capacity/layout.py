"""The check that a model can be split as asked.  Imports neither torch nor Megatron: it runs first."""

from collections.abc import Mapping

from asyncrl.config.areas import FlagWords
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.areas.ranges import must, refuse
from asyncrl.models.shape import ExpertShape, ModelShape

MULTIPLE_ON_GPU = 8
"""Elements in bfloat16: torch's grouped product needs rows of a multiple of 16 bytes."""


def check_layout(shape: ModelShape, parallel: ParallelConfig, device: str) -> None:
    """Raise ConfigError, with one line for each reason, unless ``shape`` can be split as ``parallel`` asks."""
    lines = _tensor(shape, parallel) + _pipeline(shape, parallel) + _experts(shape.experts, parallel, device)
    lines += must(
        shape.latent is not None or "mla_up_proj" not in parallel.recompute_modules,
        "recompute-modules mla_up_proj: the model has no latent attention; leave it out",
    )
    refuse(lines)


def check_engines(shape: ModelShape, num_gpus: int, flags: Mapping[str, FlagWords]) -> None:
    """Raise ConfigError, with one line for each reason, unless SGLang 0.5.16 can split ``shape`` over ``num_gpus``.

    ``num_gpus`` are the GPUs of one engine, ``flags`` the user's ``--sglang-`` flags.  SGLang asserts the same while it
    builds the model, minutes later.
    """
    if flags.keys() & _OTHER_SPLITS:
        return
    setting, copies = f"rollout-num-gpus-per-engine {num_gpus}", attention_copies(flags)
    if num_gpus % copies:
        refuse([f"sglang-dp-size {copies} does not divide {setting}"])
    ranks, given = num_gpus // copies, setting if copies == 1 else f"{setting} with sglang-dp-size {copies}"
    groups = shape.num_query_groups
    heads = must(
        shape.num_heads % ranks == 0, f"{given} does not divide the model's attention heads ({shape.num_heads})"
    ) or must(
        shape.latent is not None or groups % ranks == 0 or ranks % groups == 0,
        f"{given} neither divides the model's KV heads ({groups}) nor is a multiple of them",
    )
    refuse(
        heads
        + must(
            shape.experts is not None or copies > 1 or shape.ffn_hidden_size % num_gpus == 0,
            f"{given} does not divide the model's FFN hidden size ({shape.ffn_hidden_size})",
        )
    )


_OTHER_SPLITS = frozenset({"attn-cp-size", "attention-context-parallel-size"})
"""SGLang's flags with which fewer GPUs share the heads, in a way that is not checked."""


def attention_copies(flags: Mapping[str, FlagWords]) -> int:
    """Return the number of copies of the attention within an engine."""
    given = flags.get("dp-size", flags.get("data-parallel-size"))
    is_number = isinstance(given, str) and given.isdecimal()
    return max(1, int(str(given))) if is_number and "enable-dp-attention" in flags else 1


def _tensor(shape: ModelShape, parallel: ParallelConfig) -> list[str]:
    size = parallel.tensor_model_parallel_size
    shared = {"attention heads": shape.num_heads, "vocabulary size": shape.vocab_size}
    if shape.experts is None or shape.experts.num_dense_layers:
        shared["FFN hidden size"] = shape.ffn_hidden_size
    if shape.latent is None:
        shared["KV heads"] = shape.num_query_groups
    if shape.experts is not None and shape.experts.num_shared:
        shared["FFN hidden size of shared experts"] = shape.experts.num_shared * shape.experts.ffn_hidden_size
    return [
        f"tensor-model-parallel-size {size} does not divide the model's {what} ({count})"
        for what, count in shared.items()
        if count % size
    ]


def _pipeline(shape: ModelShape, parallel: ParallelConfig) -> list[str]:
    stages, layers = parallel.pipeline_model_parallel_size, shape.num_layers
    ends = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    given = [count for count in ends if count is not None]
    if stages == 1:
        return must(not given, "decoder-first- or -last-pipeline-num-layers without pipeline-model-parallel-size")
    left, others = layers - sum(given), stages - len(given)
    fits = left == 0 if others == 0 else left > 0 and left % others == 0
    rest = f" less {' and '.join(map(str, given))} at the ends" if given else ""
    return must(
        fits,
        f"pipeline-model-parallel-size {stages}: the model's {layers} layers{rest} cannot be split evenly over "
        f"{others or 'no'} stages; give decoder-first-pipeline-num-layers or decoder-last-pipeline-num-layers",
    )


def _experts(experts: ExpertShape | None, parallel: ParallelConfig, device: str) -> list[str]:
    size, each = parallel.expert_model_parallel_size, parallel.num_expert_tensor_ranks
    tensor = parallel.tensor_model_parallel_size
    if experts is None:
        given = size > 1 or (parallel.expert_tensor_parallel_size or 1) > 1
        return must(
            not given,
            "expert-model-parallel-size or expert-tensor-parallel-size above 1: the model has no experts",
        )
    lines = must(
        experts.num_experts % size == 0,
        f"expert-model-parallel-size {size} does not divide the model's {experts.num_experts} experts",
    )
    lines += must(
        experts.ffn_hidden_size % each == 0,
        f"expert-tensor-parallel-size {each} does not divide the experts' FFN hidden size ({experts.ffn_hidden_size})",
    )
    lines += must(
        device == "cpu" or experts.ffn_hidden_size % each > 0 or experts.ffn_hidden_size // each % MULTIPLE_ON_GPU == 0,
        f"expert-tensor-parallel-size {each}: the experts' FFN hidden size ({experts.ffn_hidden_size}) is not a "
        f"multiple of {MULTIPLE_ON_GPU} on each rank, which a GPU needs",
    )
    lines += must(  # seen in megatron-core 0.19: the gradients are not reduced
        size > 1 or each == tensor,
        f"expert-tensor-parallel-size {each} with tensor-model-parallel-size {tensor} and all experts on every rank: "
        "Megatron would not sum up the experts' gradients; give the same size, or expert-model-parallel-size above 1",
    )
    return lines + must(  # gloo cannot gather parts of different sizes
        device != "cpu" or each == 1 or size == 1,
        f"expert-tensor-parallel-size {each} with expert-model-parallel-size {size} cannot run on a CPU",
    )
