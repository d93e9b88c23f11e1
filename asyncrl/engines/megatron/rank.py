"""One rank of the trainer: a Megatron model, its optimizer, and its end of the weight update.

A plain class without Ray.  Every rank of a trainer gets the same calls with the same arguments, except for
``join_engines`` and ``send``, which are for rank 0.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
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
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from asyncrl.algorithms.advantages import group_centred, group_normalised
from asyncrl.algorithms.losses import sample_weights, token_weights
from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.megatron import cpu
from asyncrl.engines.megatron.model import build_model
from asyncrl.engines.megatron.packing import Example, Microbatch, contiguous_parts, examples_of, microbatches
from asyncrl.engines.megatron.passes import Objective, Outcome, forward_step
from asyncrl.engines.megatron.restore import RestorePoint
from asyncrl.engines.megatron.settings import TrainerSettings
from asyncrl.engines.megatron.shape import read_shape
from asyncrl.engines.megatron.update_group import flatten, join_update_group
from asyncrl.engines.megatron.weights import load_hf, plan_buckets, save_hf, to_hf
from asyncrl.errors import NonFiniteLoss, WeightUpdateFailed
from asyncrl.types import Batch, ScoredGroup, TrainReport


class MegatronRank:
    """One of ``world_size`` data-parallel ranks that meet at ``master_address:master_port``.

    Construction returns once all of them are there and hold the checkpoint's weights.  Raises ConfigError.
    """

    def __init__(
        self, settings: TrainerSettings, rank: int, world_size: int, master_address: str, master_port: int
    ) -> None:
        self._settings = settings
        self._rank, self._world_size = rank, world_size
        self._shape = read_shape(settings.model.hf_checkpoint)
        self._device = _device(settings.device, rank)
        _join_trainers(settings, rank, world_size, f"tcp://{master_address}:{master_port}")
        cpu.install()
        torch.manual_seed(settings.model.seed)
        model_parallel_cuda_manual_seed(settings.model.seed)
        self._model = build_model(self._shape, self._device, getattr(torch, settings.dtype))
        load_hf(self._model, self._shape, settings.model.hf_checkpoint)
        self._parallel = _data_parallel(self._model)
        self._optimizer = _optimizer(self._parallel, settings)
        self._buckets, self._bucket_sources = plan_buckets(
            self._model, self._shape, settings.train.update_weight_buffer_size
        )
        self._engines: dist.ProcessGroup | None = None

    def train(self, batch: Batch) -> TrainReport:
        """Run one training step.  The report has log-probs on rank 0 only.

        The same batch gives the same weights bit by bit on a CPU; how it is packed changes rounding only.
        Raises NonFiniteLoss on all ranks alike, with the weights as they were before the step.
        """
        started = time.perf_counter()
        learning_rate = self._set_learning_rate(batch.step)
        updates = self._updates(batch)
        before = self._logprobs([update.examples for update in updates[1:]])
        restore_point = RestorePoint(self._model, self._optimizer) if len(updates) > 1 else None
        try:
            first, *later = [self._update(update, before) for update in updates]
        except NonFiniteLoss:
            if restore_point:
                restore_point.restore()
            raise
        logprobs = self._gathered(before | first.logprobs, sum(len(group.samples) for group in batch.groups))
        return _report([first, *later], learning_rate, time.perf_counter() - started, logprobs)

    def save(self, path: Path) -> None:
        """Write the present weights in Hugging Face format, from rank 0; see ``weights.save_hf``."""
        if self._rank == 0:
            save_hf(self._model, self._shape, self._settings.model.hf_checkpoint, path)

    def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """What ``send`` sends, in order.  Never changes."""
        return self._buckets

    def join_engines(
        self, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Form the update group, as its rank 0, with engines that are joining at the same time.

        Leaves an earlier group.  Raises WeightUpdateFailed.
        """
        self._leave_engines()
        try:
            self._engines = join_update_group(
                master_address, master_port, world_size, group_name, backend, self._settings.timeout_s
            )
        except RuntimeError as error:
            raise WeightUpdateFailed(f"no update group {group_name} of {world_size}: {error}") from error

    def send(self, bucket_index: int) -> None:
        """Broadcast one bucket to the engines, which are receiving it.  Raises WeightUpdateFailed."""
        if self._engines is None:
            raise ValueError("send before join_engines")
        names = self._bucket_sources[bucket_index]
        tensors = [to_hf(name, self._model.get_parameter(name), self._shape) for name in names]
        try:
            dist.broadcast(flatten(tensor for _, tensor in chain(*tensors)), src=0, group=self._engines)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise WeightUpdateFailed(f"bucket {bucket_index} was not delivered: {error}") from error

    def close(self) -> None:
        """Leave all process groups; the object is of no further use."""
        self._leave_engines()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    def _leave_engines(self) -> None:
        if self._engines is not None:
            dist.destroy_process_group(self._engines)
            self._engines = None

    def _updates(self, batch: Batch) -> list["_Update"]:
        """The batch's groups, in order, as one contiguous part for each optimiser update."""
        num_updates = self._settings.num_steps_per_rollout
        if num_updates > len(batch.groups):
            raise ValueError(f"{num_updates} optimiser updates need as many groups, the batch has {len(batch.groups)}")
        against_rollout = self._settings.use_rollout_logprobs
        examples = examples_of(batch, self._advantages(batch.groups), against_rollout=against_rollout)
        return [
            _Update(
                examples=tuple(chain(*examples[part])),
                num_samples=sum(len(group.samples) for group in batch.groups[part]),
            )
            for part in contiguous_parts(len(batch.groups), num_updates)
        ]

    def _advantages(self, groups: Sequence[ScoredGroup]) -> list[float]:
        """One per sample, in batch order."""
        rewards_N = torch.tensor([scored.reward for group in groups for scored in group.samples], dtype=torch.float64)
        groups_N = torch.tensor([group.group_id for group in groups for _ in group.samples])
        centred = self._settings.train.disable_grpo_std_normalization
        advantages: list[float] = (group_centred if centred else group_normalised)(rewards_N, groups_N).tolist()
        return advantages

    def _set_learning_rate(self, step: int) -> float:
        """Constant, after a rise that reaches the full rate in training step ``lr_warmup_iters``, counted from 1."""
        train = self._settings.train
        rate = train.lr * min(1.0, (step + 1) / max(1, train.lr_warmup_iters))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    @torch.no_grad()
    def _logprobs(self, parts: list[tuple[Example, ...]]) -> dict[int, tuple[float, ...]]:
        """Under the present weights, of this rank's share of the samples, by place in the batch."""
        found: dict[int, tuple[float, ...]] = {}
        for examples in parts:
            for outcome in self._run(examples, self._objective(_Update(examples=examples, num_samples=1)), True):
                found |= outcome.logprobs_by_sample()
        return found

    def _update(self, update: "_Update", before: dict[int, tuple[float, ...]]) -> "_UpdateReport":
        """One optimiser update.  ``before`` has the log-probs at the start of the step, except for the first part."""
        self._parallel.zero_grad_buffer()
        self._optimizer.zero_grad()
        examples = update.examples
        if not self._settings.use_rollout_logprobs:
            examples = tuple(replace(example, old_logprobs=before.get(example.index)) for example in examples)
        outcomes = self._run(examples, self._objective(update), False)
        sums = torch.stack([outcome.sums for outcome in outcomes]).sum(0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        loss, clipped, entropy = sums.tolist()
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteLoss(f"loss {loss}, gradient norm {grad_norm}")
        self._optimizer.step()
        logprobs = {index: row for outcome in outcomes for index, row in outcome.logprobs_by_sample().items()}
        return _UpdateReport(
            loss=loss,
            grad_norm=grad_norm,
            clipped=clipped,
            entropy=entropy,
            num_tokens=update.num_tokens,
            logprobs=logprobs,
        )

    def _objective(self, update: "_Update") -> Objective:
        train = self._settings.train
        per_token = train.calculate_per_token_loss
        return Objective(
            temperature=self._settings.temperature,
            eps_low=train.eps_clip,
            eps_high=train.eps_clip if train.eps_clip_high is None else train.eps_clip_high,
            weigh=token_weights if per_token else sample_weights,
            count=max(1, update.num_tokens if per_token else update.num_samples),
        )

    def _run(self, examples: Sequence[Example], objective: Objective, forward_only: bool) -> list[Outcome]:
        """This rank's share through the model, and back unless ``forward_only``; gradients end up summed over ranks."""
        rows: list[Microbatch] = microbatches(
            examples, self._rank, self._world_size, self._settings.train.max_tokens_per_gpu
        )
        outcomes: list[Outcome] = get_forward_backward_func()(
            forward_step_func=forward_step(objective, self._device),
            data_iterator=iter(rows),
            model=self._parallel,
            num_microbatches=len(rows),
            seq_length=1,  # this and the next are for pipelines of fixed shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return outcomes

    def _gathered(self, mine: dict[int, tuple[float, ...]], num_samples: int) -> tuple[tuple[float, ...], ...]:
        """All ranks' log-probs in batch order on rank 0, nothing elsewhere.  A sample without tokens has none."""
        shares: list[dict[int, tuple[float, ...]]] | None = [{}] * self._world_size if self._rank == 0 else None
        dist.gather_object(mine, shares, dst=0, group=parallel_state.get_data_parallel_group_gloo())
        if shares is None:
            return ()
        found = {index: row for share in shares for index, row in share.items()}
        return tuple(found.get(index, ()) for index in range(num_samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What one optimiser update is made of, on all ranks together."""

    examples: tuple[Example, ...]
    num_samples: int
    """Those without tokens included."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the loss mask lets through."""
        return sum(sum(example.loss_mask) for example in self.examples)


@dataclass(frozen=True, slots=True, kw_only=True)
class _UpdateReport:
    """What one optimiser update did, on all ranks together; log-probs are this rank's."""

    loss: float
    grad_norm: float
    clipped: float
    entropy: float
    num_tokens: int
    logprobs: dict[int, tuple[float, ...]]


def _report(
    updates: list[_UpdateReport], learning_rate: float, seconds: float, logprobs: tuple[tuple[float, ...], ...]
) -> TrainReport:
    """Losses and norms are means over the updates, the others means over their tokens."""
    num_tokens = max(1, sum(update.num_tokens for update in updates))
    return TrainReport(
        loss=sum(update.loss for update in updates) / len(updates),
        grad_norm=sum(update.grad_norm for update in updates) / len(updates),
        clip_fraction=sum(update.clipped for update in updates) / num_tokens,
        entropy=sum(update.entropy for update in updates) / num_tokens,
        learning_rate=learning_rate,
        seconds=seconds,
        logprobs=logprobs,
    )


def _device(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join_trainers(settings: TrainerSettings, rank: int, world_size: int, address: str) -> None:
    dist.init_process_group(
        "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=address,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    parallel_state.initialize_model_parallel()


def _data_parallel(model: Any) -> Any:
    """The model with gradients in float32, summed over ranks at the end of each update."""
    parallel = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    model.config.finalize_model_grads_func = _finish_gradients
    return parallel


def _finish_gradients(models: list[Any], num_tokens: Any, **groups: Any) -> None:
    """Megatron's own, without its division by ``num_tokens``: the loss has its scale already."""
    finalize_model_grads(models, None, **groups)


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
    )
    optimizer = get_megatron_optimizer(config, [parallel])
    for group in optimizer.param_groups:  # norms and biases do not decay; Megatron's own scheduler would see to it
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
    return optimizer
