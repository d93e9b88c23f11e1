"""How the model is spread over the trainer's ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from asyncrl.config.ranges import at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the trainer's ranks share the model and the work; the ranks that are left over share the samples."""

    tensor_model_parallel_size: Annotated[int, "Ranks that share each layer's matrices."] = 1
    sequence_parallel: Annotated[
        bool,
        "Ranks that share the matrices share the activations between them, too. It is never otherwise: "
        "--no-sequence-parallel is for --tensor-model-parallel-size 1, where there is nothing to share.",
    ] = True
    pipeline_model_parallel_size: Annotated[int, "Ranks that share the layers."] = 1
    decoder_first_pipeline_num_layers: Annotated[
        int | None, "Layers of the first pipeline rank; default: as many as the others."
    ] = None
    decoder_last_pipeline_num_layers: Annotated[
        int | None, "Layers of the last pipeline rank; default: as many as the others."
    ] = None
    context_parallel_size: Annotated[int, "Ranks that share the tokens of each sample."] = 1
    expert_model_parallel_size: Annotated[int, "Ranks that share the experts of each layer."] = 1
    expert_tensor_parallel_size: Annotated[
        int | None,
        "Ranks that share the matrices of each expert; default: 1 with --expert-model-parallel-size above 1, "
        "else --tensor-model-parallel-size.",
    ] = None
    use_distributed_optimizer: Annotated[bool, "Ranks that share the samples share the optimizer's state as well."] = (
        True
    )
    overlap_grad_reduce: Annotated[bool, "Sum up gradients over ranks while the backward pass goes on."] = True
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None,
        "Compute activations again in the backward pass instead of keeping them: whole layers, or the parts "
        "of --recompute-modules. Default: keep them.",
    ] = None
    recompute_method: Annotated[
        Literal["uniform", "block"] | None,
        "full: keep the input of every --recompute-num-layers layers (uniform), or compute only the first "
        "--recompute-num-layers of each pipeline rank again (block). Default: uniform.",
    ] = None
    recompute_num_layers: Annotated[int | None, "Default: 1."] = None
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe"], ...],
        "selective: which parts; default: core_attn.",
    ] = ()

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
            + at_least(self, 1, "expert_model_parallel_size", "expert_tensor_parallel_size", "recompute_num_layers")
            + at_least(self, 1, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        )

    @property
    def num_expert_tensor_ranks(self) -> int:
        """Ranks that share the matrices of each expert."""
        if self.expert_tensor_parallel_size is not None:
            return self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if self.expert_model_parallel_size == 1 else 1

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that hold one copy of the model without its experts."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def ranks_per_expert_copy(self) -> int:
        """Ranks that hold one copy of all experts."""
        return self.num_expert_tensor_ranks * self.pipeline_model_parallel_size * self.expert_model_parallel_size

    @property
    def groups(self) -> Mapping[str, int]:
        """Arguments of Megatron's ``initialize_model_parallel``."""
        return {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "expert_model_parallel_size": self.expert_model_parallel_size,
            "expert_tensor_parallel_size": self.num_expert_tensor_ranks,
        }


def parallel_problems(parallel: ParallelConfig, num_ranks: int) -> list[str]:
    """What contradicts itself, or the number of the trainer's ranks; one line each."""
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context, experts = parallel.context_parallel_size, parallel.expert_model_parallel_size
    lines = must(
        num_ranks % parallel.ranks_per_copy == 0,
        f"tensor-model-parallel-size {tensor} x pipeline-model-parallel-size {pipeline} x context-parallel-size "
        f"{context} = {parallel.ranks_per_copy} does not divide the trainer's {num_ranks} ranks "
        "(actor-num-nodes x actor-num-gpus-per-node)",
    )
    lines += must(
        num_ranks % parallel.ranks_per_expert_copy == 0,
        f"expert-tensor-parallel-size {parallel.num_expert_tensor_ranks} x expert-model-parallel-size {experts} x "
        f"pipeline-model-parallel-size {pipeline} = {parallel.ranks_per_expert_copy} does not divide the trainer's "
        f"{num_ranks} ranks (actor-num-nodes x actor-num-gpus-per-node)",
    )
    lines += must(
        parallel.sequence_parallel or tensor == 1,
        f"no-sequence-parallel with tensor-model-parallel-size {tensor}: ranks that share the matrices share the "
        "activations between them, too; leave it out",
    )
    return lines + _recompute(parallel)


def _recompute(parallel: ParallelConfig) -> list[str]:
    is_full, is_selective = (parallel.recompute_granularity == kind for kind in ("full", "selective"))
    given = {
        "recompute-method": parallel.recompute_method is not None,
        "recompute-num-layers": parallel.recompute_num_layers is not None,
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    return must(is_full or not names, f"{names} without recompute-granularity full") + must(
        is_selective or not parallel.recompute_modules, "recompute-modules without recompute-granularity selective"
    )
