"""The parallel layout of the trainer's ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from asyncrl.config.areas.ranges import at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The parallel layout of the trainer.

    Ranks beyond one copy of the model are data-parallel: they split the samples.
    """

    tensor_model_parallel_size: Annotated[int, "Number of ranks that split each layer's matrices."] = 1
    sequence_parallel: Annotated[
        bool,
        "Split activations among tensor-parallel ranks as well. Always on with --tensor-model-parallel-size above 1; "
        "--no-sequence-parallel is accepted only at 1, where there is nothing to split.",
    ] = True
    pipeline_model_parallel_size: Annotated[int, "Number of ranks that split the layers."] = 1
    decoder_first_pipeline_num_layers: Annotated[
        int | None, "Number of layers on the first pipeline rank. Default: as many as on the others."
    ] = None
    decoder_last_pipeline_num_layers: Annotated[
        int | None, "Number of layers on the last pipeline rank. Default: as many as on the others."
    ] = None
    context_parallel_size: Annotated[int, "Number of ranks that split the tokens of each sample."] = 1
    expert_model_parallel_size: Annotated[int, "Number of ranks that split the experts of each layer."] = 1
    expert_tensor_parallel_size: Annotated[
        int | None,
        "Number of ranks that split the matrices of each expert. Default: 1 with --expert-model-parallel-size above "
        "1, else --tensor-model-parallel-size.",
    ] = None
    use_distributed_optimizer: Annotated[bool, "Shard the optimizer state over data-parallel ranks."] = True
    overlap_grad_reduce: Annotated[bool, "Overlap the gradient reduction over ranks with the backward pass."] = True
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None,
        "Activations to recompute in the backward pass instead of keeping them: whole layers (full), or the parts in "
        "--recompute-modules (selective). Default: keep all.",
    ] = None
    recompute_activations: Annotated[
        bool, "Megatron's short form of --recompute-granularity selective, which recomputes core attention."
    ] = False
    recompute_method: Annotated[
        Literal["uniform", "block"] | None,
        "Layers to recompute with --recompute-granularity full. uniform keeps the input of every "
        "--recompute-num-layers layers; block recomputes only the first --recompute-num-layers layers of each "
        "pipeline rank. Default: uniform.",
    ] = None
    recompute_num_layers: Annotated[int | None, "Number of layers for --recompute-method. Default: 1."] = None
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe"], ...],
        "Parts to recompute with --recompute-granularity selective. Default: core_attn.",
    ] = ()

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
            + at_least(self, 1, "expert_model_parallel_size", "expert_tensor_parallel_size", "recompute_num_layers")
            + at_least(self, 1, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        )

    @property
    def recomputes(self) -> Literal["full", "selective"] | None:
        """The granularity of recomputation, from either of its flags."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    @property
    def num_expert_tensor_ranks(self) -> int:
        """The number of ranks that split the matrices of each expert."""
        if self.expert_tensor_parallel_size is not None:
            return self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if self.expert_model_parallel_size == 1 else 1

    @property
    def ranks_per_copy(self) -> int:
        """The number of ranks that hold one copy of the model without its experts."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def ranks_per_expert_copy(self) -> int:
        """The number of ranks that hold one copy of all experts."""
        return self.num_expert_tensor_ranks * self.pipeline_model_parallel_size * self.expert_model_parallel_size

    @property
    def groups(self) -> Mapping[str, int]:
        """The arguments of Megatron's ``initialize_model_parallel``."""
        return {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "expert_model_parallel_size": self.expert_model_parallel_size,
            "expert_tensor_parallel_size": self.num_expert_tensor_ranks,
        }


def parallel_problems(parallel: ParallelConfig, num_ranks: int) -> list[str]:
    """One line for each contradiction within ``parallel``, or between it and the number of trainer ranks."""
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
        f"no-sequence-parallel with tensor-model-parallel-size {tensor}: tensor-parallel ranks always split the "
        "activations as well; leave out no-sequence-parallel or give tensor-model-parallel-size 1",
    )
    return lines + _recompute(parallel)


def _recompute(parallel: ParallelConfig) -> list[str]:
    is_full, is_selective = (parallel.recomputes == kind for kind in ("full", "selective"))
    given = {
        "recompute-method": parallel.recompute_method is not None,
        "recompute-num-layers": parallel.recompute_num_layers is not None,
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    if parallel.recompute_activations and parallel.recompute_granularity == "full":
        return [
            "recompute-activations with recompute-granularity full: it stands for recompute-granularity selective; "
            "leave one of them out"
        ]
    return must(
        is_full or not names, f"{names} without recompute-granularity full: give it, or leave out {names}"
    ) + must(
        is_selective or not parallel.recompute_modules,
        "recompute-modules without recompute-granularity selective: give it, or leave out recompute-modules",
    )
