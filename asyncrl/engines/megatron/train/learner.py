"""One model of a trainer rank with its optimizer: passes over packed samples, gradients, updates."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.model.packing import Example, Floats, Packing, microbatches, packing_of
from asyncrl.engines.megatron.setup.fused_adam import fuse
from asyncrl.engines.megatron.setup.gradient_norm import use_foreach_norms
from asyncrl.engines.megatron.setup.ranks import from_last_stage
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.megatron.train.forward_step import MicrobatchResult, MicrobatchStep
from asyncrl.engines.megatron.train.optimizer_updates import Update
from asyncrl.engines.megatron.train.rollback import RestorePoint
from asyncrl.errors import NonFiniteLoss, TrainerOutOfMemory, first_line
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining",
        keywords=(
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "seq_length",
            "micro_batch_size",
            "forward_only",
        ),
        attributes=("finalize_model_grads_func", "no_sync_func"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving",
        keywords=(
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "seq_length",
            "micro_batch_size",
            "forward_only",
        ),
        attributes=("finalize_model_grads_func", "no_sync_func"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.pipeline_parallel.schedules.forward_step_calc_loss",
        attributes=("calculate_per_token_loss",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.distributed.DistributedDataParallel",
        parameters=("config", "ddp_config", "module"),
        attributes=(
            "bucket_groups",
            "buffers",
            "expert_parallel_bucket_groups",
            "expert_parallel_buffers",
            "no_sync",
            "zero_grad_buffer",
        ),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup",
        attributes=("grad_reduce_handle", "per_param_grad_ready_counts"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.distributed.finalize_model_grads.finalize_model_grads",
        parameters=("model", "num_tokens"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.optimizer.get_megatron_optimizer", parameters=("config", "model_chunks"), used_in=__name__
    ),
    Internal(name="megatron.core.optimizer._get_param_groups", attributes=("wd_mult",), used_in=__name__),
    Internal(
        name="megatron.core.optimizer.optimizer.ChainedOptimizer",
        attributes=("chained_optimizers", "get_grad_norm", "param_groups", "prepare_grads", "step", "zero_grad"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)

_LESS = "lower max-tokens-per-gpu or micro-batch-size, or give recompute-granularity full"
"""The way to less memory in a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The result of the passes of one optimizer update, over all ranks; ``rows`` are those of this rank."""

    loss: float
    norm: float
    """Gradient norm before clipping."""
    sums: dict[str, float]
    """Sums over the trained tokens, by metric name."""
    num_tokens: int
    rows: dict[int, Floats]
    """Log-probs or values of each sample's response tokens, by index in the batch."""


class Learner:
    """This rank's part of a model.  Every rank gets the same calls with the same arguments."""

    def __init__(self, model: Any, settings: TrainerSettings, *, name: str) -> None:
        """Wrap ``model`` for data parallelism and make its optimizer; errors call it ``name``."""
        self._name = name
        self._rank = parallel_state.get_data_parallel_rank()
        self._num_ranks = parallel_state.get_data_parallel_world_size()
        self._packing = packing_of(settings.train, settings.parallel)
        self._is_split = max(settings.parallel.ranks_per_copy, settings.parallel.ranks_per_expert_copy) > 1
        self._reduction = _Reduction()
        self.num_repeated = 0
        """Passes of this rank that were repeated in smaller microbatches, because memory ran out; so far."""
        self.model = model
        self.parallel = _data_parallel(model, settings.parallel, self._reduction)
        self.optimizer = _optimizer(self.parallel, settings)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the updates that follow."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def close(self) -> None:
        """Break the reference cycle of model, groups and Megatron's hooks.

        Python's garbage collector does not see that cycle.
        """
        vars(self.parallel).clear()

    def share(self, update: Update) -> Sequence[Example]:
        """Select the samples of this rank, which the other ranks of its model replica share."""
        shares = self._packing.shares(update.examples, self._num_ranks)
        mine: Sequence[Example] = shares[self._rank]
        return mine

    @torch.no_grad()
    def rows(self, updates: Sequence[Update], step: MicrobatchStep) -> dict[int, Floats]:
        """Compute log-probs or values under the present weights for this rank's share, by index in the batch."""
        found: dict[int, Floats] = {}
        for update in updates:
            found |= from_last_stage(_rows_of(self._run(update.examples, step, forward_only=True)))
        return found

    def differentiate(self, update: Update, step: MicrobatchStep) -> Gradients:
        """Compute the gradients of one update, ready for ``advance``.

        Raises NonFiniteLoss on all ranks alike, and TrainerFailed if a user's loss failed.
        """
        self.parallel.zero_grad_buffer()
        self.optimizer.zero_grad()
        outcomes = self._run(update.examples, step, forward_only=False)
        step.raise_alike()
        sums, rows = from_last_stage((_summed(outcomes), _rows_of(outcomes)))
        self.optimizer.prepare_grads()
        loss, norm = sums.pop("train/loss"), float(self.optimizer.get_grad_norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLoss(f"{self._name}: loss {loss}, gradient norm {norm}: both must be finite")
        return Gradients(loss=loss, norm=norm, sums=sums, num_tokens=update.num_tokens, rows=rows)

    def advance(self) -> None:
        """Update the weights with the present gradients."""
        self.optimizer.step()

    def restore_point(self) -> RestorePoint:
        """Copy the present weights and optimizer, to be restored if a later update fails."""
        return RestorePoint(self.model, self.optimizer)

    def _run(self, examples: Sequence[Example], step: MicrobatchStep, *, forward_only: bool) -> list[MicrobatchResult]:
        """Run this rank's share forward, and backward unless ``forward_only``; gradients end up summed over ranks.

        The results are those of the last pipeline stage; other stages return none.  If memory runs out, the rank runs
        its share once more in smaller microbatches.  Raises TrainerOutOfMemory if it cannot, or runs out again.
        """
        self._reduction.has_begun = False
        try:
            return self._passed(examples, step, self._packing, forward_only=forward_only)
        except torch.OutOfMemoryError as error:
            text = first_line(error)
            if self._is_split:
                why = "not repeated, because the ranks of one model wait for each other"
                raise TrainerOutOfMemory(f"{text} ({why}; {_LESS})") from error
            if self._reduces():
                why = "not repeated, because the ranks already sum gradients"
                raise TrainerOutOfMemory(f"{text} ({why}; {_LESS})") from error
        # Invariant: outside of the block above, whose traceback holds the activations of the failed pass.
        smaller = self._packing.halved()
        logger.warning("%s: %s; repeated with microbatches of %d tokens", self._name, text, smaller.max_tokens)
        self._undo(step, forward_only=forward_only)
        self.num_repeated += 1
        try:
            return self._passed(examples, step, smaller, forward_only=forward_only)
        except torch.OutOfMemoryError as error:
            raise TrainerOutOfMemory(f"{first_line(error)} (also in smaller microbatches; {_LESS})") from error

    def _reduces(self) -> bool:
        """Whether another rank may already sum gradients with this one: then this pass cannot be repeated.

        Without such a sum no rank waits for another within a pass, so a rank may take longer, and have more
        microbatches.  The other ranks wait for it in the sum at the end of the pass.
        """
        sums = any(group.grad_reduce_handle is not None for group in self._bucket_groups)
        return self._num_ranks > 1 and (self._reduction.has_begun or sums)

    def _undo(self, step: MicrobatchStep, *, forward_only: bool) -> None:
        """Undo what a failed pass has left, and free its memory."""
        step.reset()
        if not forward_only:
            for group in self._bucket_groups:
                if group.grad_reduce_handle is not None:  # a sum over one rank
                    group.grad_reduce_handle.wait()
                    group.grad_reduce_handle = None
                group.per_param_grad_ready_counts = {}  # Megatron takes those of the first pass as the usual ones
            self.parallel.zero_grad_buffer()
            self.optimizer.zero_grad()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.empty_cache()

    @property
    def _bucket_groups(self) -> list[Any]:
        return [*self.parallel.bucket_groups, *self.parallel.expert_parallel_bucket_groups]

    def _passed(
        self, examples: Sequence[Example], step: MicrobatchStep, packing: Packing, *, forward_only: bool
    ) -> list[MicrobatchResult]:
        rows = microbatches(examples, self._rank, self._num_ranks, packing)
        outcomes: list[MicrobatchResult] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(rows),
            model=self.parallel,
            num_microbatches=len(rows),
            seq_length=1,  # this and the next argument are for pipelines of fixed shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return outcomes


def _rows_of(outcomes: Sequence[MicrobatchResult]) -> dict[int, Floats]:
    return {index: row for outcome in outcomes for index, row in outcome.by_sample().items()}


def _summed(outcomes: Sequence[MicrobatchResult]) -> dict[str, float]:
    """Sum over microbatches and data-parallel ranks; all of them report the same names."""
    if not outcomes:
        return {}
    names = sorted(outcomes[0].sums)
    sums = torch.stack([torch.stack([outcome.sums[name] for name in names]) for outcome in outcomes]).sum(0)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, sums.tolist(), strict=True))


class _Reduction:
    """The sum of gradients over ranks at the end of a pass, and whether it has begun."""

    def __init__(self) -> None:
        self.has_begun = False

    def __call__(self, models: list[Any], num_tokens: Any, **groups: Any) -> None:
        """Finish gradients as Megatron does, without its division by ``num_tokens``: the loss is already scaled."""
        self.has_begun = True
        finalize_model_grads(models, None, **groups)


def _data_parallel(model: Any, settings: ParallelConfig, reduction: _Reduction) -> Any:
    """Wrap the model; its gradients are float32, and summed over ranks by the end of each update."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_grad_reduce=settings.overlap_grad_reduce,
    )
    parallel = DistributedDataParallel(model.config, config, model)
    # Invariant: every rank sets it before the first pass.  Megatron calls it at the end of each pass, and it is
    # collective.
    model.config.finalize_model_grads_func = reduction
    if settings.overlap_grad_reduce:
        model.config.no_sync_func = parallel.no_sync  # used for all microbatches but the last
    return parallel


def _optimizer(parallel: Any, settings: TrainerSettings) -> Any:
    train = settings.train
    dtype = getattr(torch, settings.dtype)
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=0.0,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        clip_grad=train.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.parallel.use_distributed_optimizer,
    )
    use_foreach_norms()
    optimizer = get_megatron_optimizer(config, [parallel])
    for group in optimizer.param_groups:  # norms and biases do not decay; Megatron's unused scheduler does this
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
    fuse(optimizer)
    return optimizer
