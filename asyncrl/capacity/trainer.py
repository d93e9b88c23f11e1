"""The memory of a trainer rank on its GPU.  Plain arithmetic; imports neither torch nor Megatron.

    weights       in the run's dtype                                                       ``build.build_model``
    gradients     in float32: ``grad_reduce_in_fp32``                                      ``learner._data_parallel``
    optimizer     Adam's two moments in float32, and float32 copies of 16-bit weights      ``learner._optimizer``
    activations   kept for the backward pass, of every microbatch in flight                ``activations``
    working       the larger of: one layer's backward pass, log-probs over the vocabulary  this module
    copy          all weights on the first rank, for updates while training continues      ``weight_sender``

Not counted are the CUDA context, NCCL's own buffers, and gaps between the allocator's blocks.  Neither are replayed
routes: 384 bytes per token of Qwen3-30B-A3B, where activations take at least 196,608 bytes (full recomputation).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrl.capacity.activations import LayerActivations, layer_activations
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.areas.ranges import must
from asyncrl.models.shape import ModelShape
from asyncrl.models.sizes import Size, layer_size, sent_bytes, vocabulary_size

LOGITS_CHUNK_BYTES = 512 * 1024**2
"""``logprobs.CHUNK_BYTES``: bytes of the float32 logits that exist at a time."""
LOGITS_COPIES = 2.5
"""Copies of a chunk: the logits, their exponentials, and the 16-bit product that they were made from."""
COPY_SHARE = 0.1
"""The largest share of the GPU's memory for a copy of all weights that the user did not ask for."""
USABLE = 0.94
"""The usable share of a GPU's memory; CUDA, NCCL and gaps between blocks take the rest.  An H200's usable memory is the
figure of its data sheet."""
FLOAT32 = 4
"""Bytes of a float32."""
SPREAD = "spread the model over more ranks (tensor-, pipeline-, expert-model-parallel-size)"
"""Advice if the model itself is too large."""
FEWER = "lower max-tokens-per-gpu, raise context-parallel-size, or set recompute-granularity full"
"""Advice if the activations are too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWorkload:
    """The workload of a trainer rank."""

    num_ranks: int
    """The number of ranks of the trainer."""
    num_tokens: float
    """The maximum number of tokens of a microbatch on one rank; with context parallelism, in the rank's part."""
    weight_bytes: int
    """Bytes of one element of weights or activations: 2 or 4."""
    copy_bytes: float = 0.0
    """Bytes of the copy of all weights on the first rank; 0: there is no copy."""
    critic: ModelShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one GPU, at their peak."""

    stage: int
    """The pipeline stage, counted from 0."""
    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    copy: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working + self.copy


def trainer_memory(shape: ModelShape, parallel: ParallelConfig, work: RankWorkload) -> tuple[RankMemory, ...]:
    """Estimate the memory of one rank of each pipeline stage.

    The ranks of a stage differ by less than one layer's norms.
    """
    return tuple(_stage_memory(shape, parallel, work, stage) for stage in range(parallel.pipeline_model_parallel_size))


def with_copy(
    shape: ModelShape, parallel: ParallelConfig, work: RankWorkload, *, limit: float, wanted: bool | None
) -> RankWorkload:
    """Return ``work``, with the copy of all weights on the first rank if updates are sent while training continues.

    ``wanted`` None: the copy is made if it takes at most COPY_SHARE of ``limit``, the bytes of the rank's GPU, and if
    everything else fits as well.
    """
    copied = replace(work, copy_bytes=sent_bytes(shape, work.weight_bytes))
    if wanted is None:
        first, *_ = trainer_memory(shape, parallel, copied)
        wanted = copied.copy_bytes <= COPY_SHARE * limit and first.total <= limit
    return copied if wanted else work


def has_copy(
    shape: ModelShape, parallel: ParallelConfig, work: RankWorkload, *, memory: int | None, wanted: bool | None
) -> bool:
    """Whether the first rank copies all weights, so that training continues during updates.

    All ranks decide alike if their GPUs are alike.  ``memory`` is the rank's GPU memory in bytes; None means a CPU,
    which has room for a copy.  ``wanted`` None decides as ``with_copy`` does.
    """
    if wanted is not None or memory is None:
        return wanted is not False
    return with_copy(shape, parallel, work, limit=USABLE * memory, wanted=None).copy_bytes > 0


def trainer_problems(stages: Sequence[RankMemory], *, num_tokens: float, limit: float) -> list[str]:
    """Return one line if a trainer rank does not fit on a GPU of ``limit`` bytes with ``num_tokens`` at a time."""
    fullest = max(stages, key=lambda stage: stage.total)
    lasting = fullest.weights + fullest.gradients + fullest.optimizer
    return must(
        fullest.total <= limit,
        f"a trainer rank needs {fullest.total / 1e9:.1f} GB on pipeline stage {fullest.stage}, a GPU has "
        f"{limit / 1e9:g} GB (gpu-memory-gb): weights, gradients and optimizer {lasting / 1e9:.1f} GB, the rest for "
        f"{num_tokens:,.0f} tokens at a time; {SPREAD if lasting > limit / 2 else FEWER}",
    )


def stage_layers(num_layers: int, parallel: ParallelConfig) -> list[range]:
    """Return the layers of each pipeline stage."""
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    left, others = num_layers - (first or 0) - (last or 0), stages - (first is not None) - (last is not None)
    each = left // others if others else 0
    counts = [each] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _stage_memory(shape: ModelShape, parallel: ParallelConfig, work: RankWorkload, stage: int) -> RankMemory:
    held = [_held(shape, parallel, stage)]
    if work.critic is not None:
        held.append(_held(replace(work.critic, ties_embeddings=True), parallel, stage, has_words=False))
    numbers = sum(_per_rank(size, parallel) for size in held)
    sharded = [numbers for size in held for numbers in _optimized(size, parallel, work.num_ranks)]
    activations = _activations(shape, parallel, work, stage)
    if work.critic is not None:
        activations = max(activations, _activations(work.critic, parallel, work, stage))
    states = 3 if work.weight_bytes < FLOAT32 else 2
    return RankMemory(
        stage=stage,
        weights=numbers * work.weight_bytes,
        gradients=numbers * FLOAT32,
        optimizer=sum(sharded) * states * FLOAT32,
        activations=activations,
        working=max(
            _backwards(shape, parallel, work, stage),
            _words(shape, parallel, work) if stage == parallel.pipeline_model_parallel_size - 1 else 0.0,
        ),
        copy=work.copy_bytes if stage == 0 else 0.0,
    )


def _held(shape: ModelShape, parallel: ParallelConfig, stage: int, *, has_words: bool = True) -> Size:
    """Count the parameters of a stage, before its ranks split them."""
    stages = parallel.pipeline_model_parallel_size
    size = Size()
    for layer in stage_layers(shape.num_layers, parallel)[stage]:
        size += layer_size(shape, layer)
    if stage == 0:
        size += vocabulary_size(shape)
    if stage == stages - 1:
        size += Size(whole=shape.hidden_size)
        if has_words and (stages > 1 or not shape.ties_embeddings):  # a tied output layer is a copy on another stage
            size += vocabulary_size(shape)
    return size


def _per_rank(size: Size, parallel: ParallelConfig) -> float:
    sharing = parallel.num_expert_tensor_ranks * parallel.expert_model_parallel_size
    return size.split / parallel.tensor_model_parallel_size + size.whole + size.experts / sharing


def _optimized(size: Size, parallel: ParallelConfig, num_ranks: int) -> tuple[float, float]:
    """Count the parameters whose optimizer state this rank keeps: of experts, and of everything else.

    The experts have a separate optimizer.
    """
    others = _per_rank(Size(split=size.split, whole=size.whole), parallel)
    experts = _per_rank(Size(experts=size.experts), parallel)
    if not parallel.use_distributed_optimizer:
        return experts, others
    # Context-parallel ranks also have copies of the weights outside experts.
    copies = num_ranks // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    return experts / (num_ranks // parallel.ranks_per_expert_copy), others / copies


def _activations(shape: ModelShape, parallel: ParallelConfig, work: RankWorkload, stage: int) -> float:
    """Return the bytes kept for the backward pass of as many microbatches as there are stages from here on (1F1B)."""
    layers = stage_layers(shape.num_layers, parallel)[stage]
    activations = [layer_activations(shape, layer, parallel, work.num_tokens) for layer in layers]
    numbers = sum(_stays(each, place, parallel) for place, each in enumerate(activations))
    return (parallel.pipeline_model_parallel_size - stage) * numbers * work.weight_bytes


def _stays(layer: LayerActivations, place: int, parallel: ParallelConfig) -> float:
    """Count the elements kept of one layer, the ``place``-th of its stage, without the recomputed ones."""
    if parallel.recomputes == "selective":
        return layer.total - _let_go(layer, parallel)
    if parallel.recomputes is None:
        return layer.total
    every, is_block = parallel.recompute_num_layers or 1, parallel.recompute_method == "block"
    if is_block and place >= every:
        return layer.total
    return layer.norms / 2 if is_block or place % every == 0 else 0.0  # the layer's input, as large as a norm's output


def _let_go(layer: LayerActivations, parallel: ParallelConfig) -> float:
    """Count the elements that selective recomputation frees.

    ``core_attn`` frees rotated queries and keys but keeps them unrotated, so it only frees what context-parallel ranks
    gather.  ``moe_act`` has nothing to free.  ``mlp`` is for layers without experts, ``moe`` for layers with experts.
    """
    sizes = {
        "core_attn": layer.gathered,
        "layernorm": layer.norms,
        "mla_up_proj": layer.latent_up,
        "moe" if layer.stacked else "mlp": layer.mlp,
    }
    modules = set(parallel.recompute_modules or ("core_attn",))
    return sum(sizes.get(module, 0.0) for module in modules)


def _backwards(shape: ModelShape, parallel: ParallelConfig, work: RankWorkload, stage: int) -> float:
    """Return the bytes for the backward pass of one layer.

    They are recomputed activations, gradients within the MLP, which are as large as the activations it kept, the
    gradient of all experts of a layer, and the gathered input of a matrix with tensor parallelism.
    """
    layers = stage_layers(shape.num_layers, parallel)[stage]
    activations = [layer_activations(shape, layer, parallel, work.num_tokens) for layer in layers]
    again = 0.0
    if parallel.recomputes == "full":
        at_once = 1 if parallel.recompute_method == "block" else parallel.recompute_num_layers or 1
        again = max(sum(each.total for each in activations[at : at + at_once]) for at in range(len(activations)))
    elif parallel.recomputes == "selective":
        again = max(_let_go(each, parallel) for each in activations)
    gathered = work.num_tokens * shape.hidden_size if parallel.tensor_model_parallel_size > 1 else 0.0
    return (again + max(each.mlp + each.stacked for each in activations) + gathered) * work.weight_bytes


def _words(shape: ModelShape, parallel: ParallelConfig, work: RankWorkload) -> float:
    """Return the bytes for log-probs and their backward pass (``logprobs``).

    They are the hidden states and their gradient, the output layer's gradient in float32 and in the run's dtype, and a
    chunk of logits.
    """
    words = shape.vocab_size / parallel.tensor_model_parallel_size
    chunk = min(LOGITS_CHUNK_BYTES, FLOAT32 * words * work.num_tokens)
    hidden = 2 * work.num_tokens * shape.hidden_size * work.weight_bytes
    return hidden + words * shape.hidden_size * (FLOAT32 + work.weight_bytes) + LOGITS_COPIES * chunk
