"""One rank of the trainer: a Megatron model, its optimizer, and its end of the weight update.

A plain class without Ray.  Every rank of a trainer gets the same calls with the same arguments.  The exceptions are
``join_engines``, ``join_parts``, ``meet_engine``, ``resend`` and ``abandon``: they are called on rank 0 only, where a
second thread may call them.
"""

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from asyncrl.capacity.layout import check_layout
from asyncrl.capacity.trainer import RankWorkload, has_copy
from asyncrl.config.areas import CheckpointConfig
from asyncrl.config.derived import critic_load, has_critic, ref_load, uses_reference
from asyncrl.engines.listening import bind_stores
from asyncrl.engines.megatron.checkpoint.directory import Origin, as_written, check_model, find_origin, notes_of
from asyncrl.engines.megatron.checkpoint.saver import Saver
from asyncrl.engines.megatron.checkpoint.state import load_state, sharded_state
from asyncrl.engines.megatron.checkpoint.writes import Target
from asyncrl.engines.megatron.fast_step.check import check_fast_step, operations_in_use
from asyncrl.engines.megatron.fast_step.sizes import sizes_of
from asyncrl.engines.megatron.internals import check_trainer_internals
from asyncrl.engines.megatron.model.build import build_model
from asyncrl.engines.megatron.model.implementation import check_alike, with_implementation
from asyncrl.engines.megatron.model.packing import Example, Floats
from asyncrl.engines.megatron.model.routing import RoutingReplay
from asyncrl.engines.megatron.setup.cpu_emulation import emulate_cuda
from asyncrl.engines.megatron.setup.gloo_device import share_gloo_device
from asyncrl.engines.megatron.setup.ranks import on_first_rank
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.megatron.train.critic import Critic, critic_shape
from asyncrl.engines.megatron.train.custom_advantage import custom_advantages, custom_of
from asyncrl.engines.megatron.train.forward_step import logprob_step, loss_step
from asyncrl.engines.megatron.train.learner import Gradients, Learner
from asyncrl.engines.megatron.train.learning_rates import policy_schedule
from asyncrl.engines.megatron.train.objective import Objective
from asyncrl.engines.megatron.train.offload import TrainerMemory
from asyncrl.engines.megatron.train.optimizer_updates import Update, unknown_share, updates_of
from asyncrl.engines.megatron.train.reference import ReferenceWeights
from asyncrl.engines.megatron.train.reports import critic_metrics, forget_peak, memory_metrics, report
from asyncrl.engines.megatron.train.sample_advantages import (
    needs_proximal,
    outcomes_of,
    turn_outcomes_of,
    with_advantages,
)
from asyncrl.engines.megatron.weights.engine_meeting import meet_engine
from asyncrl.engines.megatron.weights.fp8 import fp8_of
from asyncrl.engines.megatron.weights.hf_weights import load_hf, save_hf
from asyncrl.engines.megatron.weights.sharding import is_split
from asyncrl.engines.megatron.weights.update_group import GroupStore, GroupStores, join_update_group
from asyncrl.engines.megatron.weights.weight_sender import RankWeightSender
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.group_abort import UpdateGroups, abandon
from asyncrl.engines.weight_sync.part_groups import join_as_trainer
from asyncrl.engines.weight_sync.path_check import Meeting
from asyncrl.errors import ConfigError, NonFiniteLoss, WeightUpdateFailed
from asyncrl.models.overrides import overridden
from asyncrl.models.shape import ModelShape, read_shape
from asyncrl.types import Batch, TrainReport


class MegatronRank:
    """One of ``world_size`` ranks that meet at ``master_address:master_port``.

    Construction returns once all ranks are connected and hold their parts of the checkpoint.  Raises ConfigError or
    InternalsChanged.
    """

    def __init__(
        self, settings: TrainerSettings, rank: int, world_size: int, master_address: str, master_port: int
    ) -> None:
        check_trainer_internals()
        self._settings = settings = with_implementation(settings)
        self._rank = rank
        self._custom = custom_of(settings.custom)
        self._shape = overridden(read_shape(settings.model.hf_checkpoint), settings.shape)
        check_layout(self._shape, settings.parallel, settings.device)
        critic = critic_shape(settings, self._shape) if has_critic(settings.train) else None
        _check_other_models(settings, self._shape, critic)
        self._device = _device(settings.device, rank)
        bind_stores()
        _join_trainers(settings, rank, world_size, f"tcp://{master_address}:{master_port}")
        check_alike(settings)
        emulate_cuda()
        torch.manual_seed(settings.model.seed)
        model_parallel_cuda_manual_seed(settings.model.seed)
        dtype, layers = getattr(torch, settings.dtype), settings.model.transformer_impl
        self._model = build_model(self._shape, self._device, dtype, settings.parallel, layers)
        self._replay = RoutingReplay(self._model)
        load_hf(self._model, self._shape, settings.model.hf_checkpoint)
        self._learner = Learner(self._model, settings, name="policy")
        self._optimizer = self._learner.optimizer
        self._critic = None if critic is None else Critic(settings, critic, self._device)
        self._reference = self._load_reference() if uses_reference(settings.train) else None
        self._weight_sender = RankWeightSender(
            self._model,
            self._shape,
            settings.train.update_weight_buffer_size,
            is_copied=_copies_weights(settings, self._shape, critic, world_size, self._device),
            fp8=fp8_of(settings.model.hf_checkpoint, self._shape),
            num_parts=settings.num_expert_parts,
        )
        critics = [] if self._critic is None else [self._critic.learner]
        self._memory = TrainerMemory([self._learner, *critics])
        self._update_groups: UpdateGroups | None = None
        self._group_stores = GroupStores()
        self._abandon_lock = Lock()
        """Held while groups are aborted or left, which two threads may do."""
        self._send_lock = Lock()
        """Held while ``send`` runs, so that no other thread destroys the update group under it."""
        self._saver: Saver | None = None

    @property
    def layers(self) -> str:
        """Implementation of the layers, local or transformer_engine; latent attention is always local."""
        return str(self._model.config.transformer_impl)

    def check_fast_step(self) -> tuple[str, ...]:
        """Compare the fast operations of a training step with their plain forms, at the sizes of this model.

        Returns one line per operation, over all ranks.  Nothing of the training changes.  Raises FastStepWrong on all
        ranks alike.
        """
        sizes = sizes_of(self._model, self._shape, self._settings, self._device)
        return check_fast_step(sizes, operations_in_use(sizes, self._optimizer))

    def train(self, batch: Batch) -> TrainReport:
        """Run one training step.  The report has log-probs on rank 0 only.

        On a CPU, the same batch gives the same weights bit by bit; a different packing changes rounding only.  Raises
        NonFiniteLoss on all ranks alike, with the weights as they were before the step.  Raises TrainerFailed if a
        user's function failed.
        """
        started = time.perf_counter()
        forget_peak(self._device)
        learning_rate = self._set_learning_rate(batch.step)
        learners = [self._learner] if self._critic is None else [self._learner, self._critic.learner]
        repeated_before = sum(learner.num_repeated for learner in learners)
        updates, before, told = self._prepared(batch)
        restore_points = [learner.restore_point() for learner in learners] if len(updates) > 1 else []
        critic_only = batch.step < self._settings.train.num_critic_only_steps
        try:
            found, of_critic = zip(*[self._update(update, critic_only=critic_only) for update in updates], strict=True)
        except NonFiniteLoss:
            for restore_point in restore_points:
                restore_point.restore()
            raise
        num_samples = sum(len(group.samples) for group in batch.groups)
        logprobs = self._gathered(found[0].rows | before, num_samples)
        advantages = self._advantages(updates, num_samples) if self._settings.reports_advantages else ()
        told |= self._replay.metrics(_examples(updates))
        told |= self._repeated(sum(learner.num_repeated for learner in learners) - repeated_before)
        told |= critic_metrics([each for each in of_critic if each is not None]) | memory_metrics(self._device)
        return report(found, told, learning_rate, time.perf_counter() - started, logprobs, advantages)

    def save(self, path: Path) -> None:
        """Write the present weights in Hugging Face format, from rank 0; see ``hf_weights.save_hf``."""
        if self._rank == 0 or is_split():
            save_hf(self._model, self._shape, self._settings.model.hf_checkpoint, path)

    def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """Return the buckets of a weight update in the order of sending, which never changes."""
        return self._weight_sender.buckets

    def open_group(self, master_address: str, master_port: int, group_name: str) -> None:
        """Serve the store of an update group from now on.  Leaves an earlier group.

        Another thread may call it while this rank trains.  Raises WeightUpdateFailed.
        """
        self._opened(master_address, master_port, group_name)

    def _opened(self, master_address: str, master_port: int, group_name: str) -> GroupStore:
        self._leave_engines()
        try:
            store = GroupStore(master_address, master_port)
        except RuntimeError as error:
            raise WeightUpdateFailed(f"cannot serve the store of update group {group_name}: {error}") from error
        self._group_stores.add(group_name, store)
        return store

    def join_engines(
        self, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Form the update group, as its rank 0, with engines that join at the same time.  Opens it if it is not open.

        Another thread may call it while this rank trains.  Raises WeightUpdateFailed, at once if the group is
        abandoned.
        """
        store = self._group_stores.of(group_name) or self._opened(master_address, master_port, group_name)
        try:
            group = join_update_group(store, world_size, group_name, backend, self._settings.timeout_s)
        except RuntimeError as error:
            store.close()
            raise WeightUpdateFailed(f"cannot form update group {group_name} of {world_size} ranks: {error}") from error
        self._update_groups = UpdateGroups(main=group)

    def join_parts(self, num_parts: int, world_size: int, group_name: str, backend: str) -> None:
        """Form one more group for each of ``num_parts`` expert parts, of ``world_size`` ranks each, as its rank 0.

        Another thread may call it while this rank trains.  Raises WeightUpdateFailed.
        """
        groups = self._update_groups
        if groups is None:
            raise ValueError("no engines have joined: call join_engines first")
        timeout_s = self._settings.timeout_s
        try:
            parts = join_as_trainer(
                groups.main, num_parts, world_size, name=group_name, backend=backend, timeout_s=timeout_s
            )
        except RuntimeError as error:
            raise WeightUpdateFailed(f"cannot form the groups {group_name} of {world_size} ranks: {error}") from error
        self._update_groups = replace(groups, parts=parts)

    def meet_engine(self, where: Meeting, timeout_s: float) -> None:
        """Run a collective with one engine, in the group ``where``, which is left afterwards.

        Another thread may call it while this rank trains.  Raises WeightUpdateFailed after about ``timeout_s``.
        """
        meet_engine(where, self._device, timeout_s)

    def abandon(self, group_name: str) -> None:
        """Abandon the update group ``group_name``, whatever this rank is doing; a later group is left as it is.

        Another thread may call it.  Operations of the group that wait for engines end, here and in engines.  So do the
        waits of members for others, whether they form this group or groups of expert parts.
        """
        # Invariant: the store is closed first.  A thread that waits in it holds the only connection of this process,
        # and engines take a group without a store for abandoned.
        self._group_stores.give_up(group_name)
        if not self._is_in(group_name):  # another group may be about to be left, which takes a while
            return
        with self._abandon_lock:
            if self._update_groups is not None and self._is_in(group_name):
                abandon(self._update_groups)

    def _is_in(self, group_name: str) -> bool:
        groups = self._update_groups
        return groups is not None and groups.main.group_name == group_name

    def snapshot(self, is_checked: bool, by_part: bool = False) -> bool:
        """Copy the present weights and start to broadcast the copy from rank 0 to the engines.

        ``by_part`` sends each bucket of experts to the ranks of its expert part alone.  Returns False, without a copy
        or a broadcast, if there is no memory for a copy: the caller then calls ``send``.  Raises WeightUpdateFailed.
        """
        self._check_joined()
        return self._weight_sender.snapshot(self._update_groups, is_checked=is_checked, by_part=by_part)

    def resend(self, is_checked: bool, by_part: bool = False) -> bool:
        """Start to broadcast the last snapshot once more, from rank 0 to the engines.

        Returns False, without a broadcast, if that snapshot is gone.  Another thread may call it while this rank
        trains.  Raises WeightUpdateFailed.
        """
        groups = self._update_groups
        return groups is not None and self._weight_sender.resend(groups, is_checked=is_checked, by_part=by_part)

    def send(self, is_checked: bool, by_part: bool = False) -> None:
        """Broadcast the present weights from rank 0 to the receiving engines.  Raises WeightUpdateFailed."""
        self._check_joined()
        with self._send_lock:
            self._weight_sender.send(self._update_groups, is_checked=is_checked, by_part=by_part)

    def share(self, bucket: int) -> str:
        """Return a handle of a bucket's present weights, for an engine on this rank's device."""
        return self._weight_sender.share(bucket)

    def unshare(self) -> None:
        """Free the shared bucket, which no engine may have mapped any more."""
        self._weight_sender.unshare()

    def fetch(self) -> None:
        """Move everything that was put away back to the device.

        Required before any call other than ``put_away_optimizer``, ``put_away_weights`` and ``share``.
        """
        self._memory.fetch()

    def put_away_optimizer(self) -> None:
        """Move the optimizer to host memory and free the gradients; the weights stay readable."""
        self._memory.put_away_optimizer()

    def put_away_weights(self) -> None:
        """Move the weights to host memory."""
        self._memory.put_away_weights()

    def write_weights(self, folder: Path) -> None:
        """Write the weights of an update to ``folder``, from rank 0.  The folder appears once it is complete.

        Raises WeightUpdateFailed.
        """
        self._weight_sender.write(self._settings.model.hf_checkpoint, folder, is_writer=self._rank == 0)

    def load(self, origin: Origin) -> None:
        """Load the weights of ``origin``, and whatever else it has, in place of the Hugging Face checkpoint's.

        Allowed before the first step only.  Raises CheckpointFailed or ConfigError.
        """
        if origin.kind == "hugging_face":
            shape = replace(self._shape, fp8_block=read_shape(origin.folder).fp8_block)
            load_hf(self._model, shape, origin.folder)
            self._optimizer.reload_model_params()
        else:
            critic = None if self._critic is None else self._critic.learner
            everything = origin.kind == "resume"
            load_state(self._learner, critic, origin.folder, everything=everything, with_optimizer=origin.optimizer)

    def begin_checkpoint(self, target: Target, run: Mapping[str, Any], with_optimizer: bool) -> float:
        """Copy everything to host memory, return the seconds that took, and write it to ``target`` in the background.

        ``run`` describes the progress of the run; it is stored with the weights.  Waits for the previous checkpoint.
        Raises CheckpointFailed or LeaseLost.
        """
        if self._saver is None:
            self._saver = Saver(self._settings.save_timeout_s)
        critic = None if self._critic is None else self._critic.learner
        state = partial(sharded_state, self._learner, critic, with_optimizer=with_optimizer)
        return self._saver.begin(state, target, notes_of(self._shape, run))

    def check_checkpoint(self) -> bool:
        """Return whether a checkpoint is being written, at once.  Raises CheckpointFailed if it has failed."""
        return self._saver is not None and self._saver.check()

    def finish_checkpoint(self) -> None:
        """Wait until no checkpoint is being written.  Raises CheckpointFailed or LeaseLost."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Leave all process groups.  The object is unusable afterwards."""
        self._leave_engines()
        self._learner.close()
        if self._critic is not None:
            self._critic.learner.close()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    def _check_joined(self) -> None:
        if self._rank == 0 and self._update_groups is None:
            raise ValueError("no engines have joined: call join_engines first")

    def _leave_engines(self) -> None:
        with self._abandon_lock:
            self._leave(self._update_groups)

    def _leave(self, groups: UpdateGroups | None) -> None:
        if groups is None:
            return
        abandon(groups)
        with self._send_lock:
            self._weight_sender.abandon()
            for group in groups.every:
                dist.destroy_process_group(group)
            self._update_groups = None
        self._group_stores.close()

    def _load_reference(self) -> ReferenceWeights:
        """Load the reference weights by way of the policy's model, which gets its weights back."""
        policy = self._settings.model.hf_checkpoint
        origin = find_origin(CheckpointConfig(), ref_load(self._settings.train, self._settings.model))
        if origin is None or origin.folder == policy:
            return ReferenceWeights(self._model)
        self.load(origin)
        reference = ReferenceWeights(self._model)
        self.load(Origin(folder=policy, kind="hugging_face"))
        return reference

    def _prepared(self, batch: Batch) -> tuple[list[Update], dict[int, Floats], dict[str, float]]:
        """Prepare a step: its updates, this rank's log-probs from before the step, and the metrics so far.

        The first update computes its log-probs itself, unless advantages depend on them.
        """
        train = self._settings.train
        updates = updates_of(batch, self._settings.num_steps_per_rollout)
        self._replay.begin(_examples(updates))
        before = self._logprobs(updates if needs_proximal(train) else updates[1:], self._replay)
        reference = self._reference_logprobs(updates)
        values = {} if self._critic is None else self._critic.values(updates)
        mine = [
            replace(
                example,
                proximal_logprobs=before.get(example.index),
                ref_logprobs=reference.get(example.index),
                values=values.get(example.index),
            )
            for update in updates
            for example in self._learner.share(update)
        ]
        outcomes_N = outcomes_of(batch, train)
        custom = custom_advantages(self._custom.advantage, batch, outcomes_N, mine, train)
        mine, told = with_advantages(mine, outcomes_N, train, self._total, custom, turn_outcomes_of(batch, train))
        if unknown := unknown_share(updates):
            told["train/unknown_logprobs"] = unknown
        return [update.changed(mine) for update in updates], before, told

    def _repeated(self, num_passes: int) -> dict[str, float]:
        """Return the metric of passes that were repeated on any rank; none if there were none."""
        total = float(self._total(torch.tensor([float(num_passes)])))
        return {"train/repeated_passes": total} if total else {}

    def _total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum over the data-parallel ranks, which have different samples."""
        totals = numbers.clone()
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group_gloo())
        return totals

    def _set_learning_rate(self, step: int) -> float:
        """Set the learning rates of training step ``step``, counted from 0, and return the policy's."""
        rate = policy_schedule(self._settings).rate(step)
        self._learner.set_rate(rate)
        if self._critic is not None:
            self._critic.set_rate(step)
        return rate

    def _logprobs(self, updates: Sequence[Update], replay: RoutingReplay | None = None) -> dict[int, Floats]:
        """Compute log-probs under the present weights for this rank's share of the samples, by index in the batch."""
        return self._learner.rows(updates, logprob_step(self._settings.temperature, self._device, replay))

    def _reference_logprobs(self, updates: Sequence[Update]) -> dict[int, Floats]:
        if self._reference is None:
            return {}
        with self._reference.in_place(self._model):
            return self._logprobs(updates)

    def _update(self, update: Update, *, critic_only: bool) -> tuple[Gradients, Gradients | None]:
        """Run one optimizer update of policy and critic, or of neither if a gradient is not finite.

        With ``critic_only`` the policy's weights stay unchanged.
        """
        found = self._learner.differentiate(update, loss_step(self._objective(update), self._device, self._replay))
        self._replay.read_counts()
        of_critic = None if self._critic is None else self._critic.differentiate(update)
        if not critic_only:
            self._learner.advance()
        if self._critic is not None:
            self._critic.learner.advance()
        return found, of_critic

    def _objective(self, update: Update) -> Objective:
        train = self._settings.train
        return Objective(
            train=train,
            temperature=self._settings.temperature,
            against_rollout=self._settings.use_rollout_logprobs,
            custom=self._custom.loss,
            tis=self._custom.tis,
            count=update.count(per_token=train.calculate_per_token_loss),
        )

    def _advantages(self, updates: Sequence[Update], num_samples: int) -> tuple[Sequence[float], ...]:
        """Gather the advantages of all samples on rank 0, in batch order."""
        mine = (example for update in updates for example in self._learner.share(update))
        rows = {each.index: each.advantages for each in mine if each.advantages is not None}
        return self._gathered(rows, num_samples)

    def _gathered(self, mine: dict[int, Floats], num_samples: int) -> tuple[Sequence[float], ...]:
        """Gather rows of all ranks on rank 0, in batch order; a sample without tokens has an empty one.

        They are arrays: a million numbers in tuples would hold up the driver's event loop for 60 ms.
        """
        shares = on_first_rank(mine)
        if not shares:
            return ()
        found = {index: row for share in shares for index, row in share.items()}
        return tuple(array("f", found[index].tobytes() if index in found else ()) for index in range(num_samples))


def _examples(updates: Sequence[Update]) -> list[Example]:
    return [example for update in updates for example in update.examples]


def _check_other_models(settings: TrainerSettings, shape: ModelShape, critic: ModelShape | None) -> None:
    """Check that reference model and critic fit the policy.  Raises ConfigError."""
    path = ref_load(settings.train, settings.model)
    is_other = path != settings.model.hf_checkpoint
    is_hf = (path / "config.json").is_file()  # else a Megatron checkpoint, which is checked when it is loaded
    if is_other and is_hf and uses_reference(settings.train):
        check_model(path, as_written(overridden(read_shape(path), settings.shape)), shape)
    path = critic_load(settings.train, settings.model)
    if critic is not None:
        check_layout(critic, settings.parallel, settings.device)
        if critic.vocab_size != shape.vocab_size:
            raise ConfigError(
                f"critic-load {path} has a vocabulary size of {critic.vocab_size}, the policy {shape.vocab_size}; "
                "they must be equal"
            )


def _copies_weights(
    settings: TrainerSettings, shape: ModelShape, critic: ModelShape | None, num_ranks: int, device: torch.device
) -> bool:
    """Return whether weight updates send a copy of the weights, so that training continues meanwhile."""
    train, parallel = settings.train, settings.parallel
    each = (settings.row_tokens or 0) / parallel.context_parallel_size
    work = RankWorkload(
        num_ranks=num_ranks,
        num_tokens=each or train.max_tokens_per_gpu,
        weight_bytes=getattr(torch, settings.dtype).itemsize,
        critic=critic,
    )
    memory = _memory_of(device)
    return has_copy(shape, parallel, work, memory=memory, wanted=train.update_weights_during_training)


def _memory_of(device: torch.device) -> int | None:
    """Return the GPU's memory in bytes; None for a CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory


def _device(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join_trainers(settings: TrainerSettings, rank: int, world_size: int, address: str) -> None:
    if settings.device == "cpu":
        share_gloo_device()
    dist.init_process_group(
        "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=address,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    minutes: Any = settings.timeout_s / 60  # Megatron's annotation is int, but any number of minutes will do
    parallel_state.initialize_model_parallel(**settings.parallel.groups, distributed_timeout_minutes=minutes)
