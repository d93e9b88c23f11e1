"""The state of a trainer rank in a checkpoint: Megatron's sharded state, which another parallel layout can read."""

import pickle
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.engines.megatron.checkpoint.gathered import Gathering, with_separate_storages
from asyncrl.engines.megatron.checkpoint.host_memory import CheckpointMemory
from asyncrl.engines.megatron.setup.fused_adam import adams, members, optimizers, place_steps
from asyncrl.errors import CheckpointFailed, first_line
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.dist_checkpointing.load",
        parameters=("sharded_state_dict", "checkpoint_dir"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.serialization.load_sharded_metadata",
        parameters=("checkpoint_dir",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.utils.add_prefix_for_sharding",
        parameters=("sharded_state_dict", "prefix"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.mapping.ShardedObject",
        parameters=("key", "data", "global_shape", "global_offset"),
        keywords=("replica_id",),
        attributes=("unique_key",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.models.gpt.gpt_model.GPTModel.sharded_state_dict",
        parameters=("self",),
        keywords=("metadata",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.models.gpt.gpt_model.GPTModel",
        attributes=("post_process", "output_layer", "vocab_size"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_state_dict",
        parameters=("self", "model_sharded_state_dict"),
        keywords=("is_loading", "metadata"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        parameters=("self", "model_param", "tensors"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        attributes=(
            "model_param_group_index_map",
            "param_state",
            "param_state_sharding_type",
            "fully_reshardable",
            "distrib_optim_sharding_type",
            "distrib_optim_fully_reshardable_mem_efficient",
            "init_state_fn",
            "reload_model_params",
        ),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
        attributes=("fp32_from_fp16_params", "common_step"),
        used_in=__name__,
    ),
    Internal(name="megatron.core.optimizer.optimizer.FP32Optimizer", attributes=("common_step",), used_in=__name__),
    Internal(
        name="megatron.core.optimizer.optimizer.ChainedOptimizer",
        attributes=("chained_optim_avoid_prefix",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.tensor_parallel.random.CudaRNGStatesTracker",
        attributes=("get_states", "set_states"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

_SHARDING = "fully_reshardable"
"""Megatron's name for the format of a distributed optimizer that another number of ranks can read."""
LONGEST_LINE = 300
"""The maximum length of an error line, in characters.  Megatron's errors list every tensor of the checkpoint."""
_WORDS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Weights with one row for each entry of the vocabulary."""
_PARTS = "parts"
"""The key under which ``load_state`` has the optimizer's tensors, apart from the rest of the optimizer's state."""
_MISSING_STATE = re.compile(r"optimizer\.state\.\S+ from model not in state dict")
"""Part of torch's error for a tensor that the checkpoint lacks, with Megatron's name for a tensor of the optimizer."""
_NO_STATE = (
    "it has no state of this kind of optimizer: it was written with --no-save-optim, or with another "
    "--use-distributed-optimizer or dtype; --no-load-optim begins with a fresh optimizer"
)


class ModelWithOptimizer(Protocol):
    """A model with its optimizer."""

    model: Any
    optimizer: Any


def sharded_state(
    policy: ModelWithOptimizer, critic: ModelWithOptimizer | None, host: CheckpointMemory, *, with_optimizer: bool
) -> dict[str, Any]:
    """Return weights, random state and optimizer state, and the critic's weights and optimizer state if there is one.

    The state of a distributed optimizer is gathered in ``host``.  All other tensors are the live ones, not copies.
    Collective.
    """
    state = _sharded_learners(policy, critic, with_optimizer=with_optimizer, host=host)
    with_separate_storages(state, host)
    return state


def sharded_weights(model: Any) -> dict[str, Any]:
    """Return the weights alone, under the same name as in a whole checkpoint."""
    with _without_head(model):
        return {"model": model.sharded_state_dict(metadata=_metadata())}


def load_state(
    policy: ModelWithOptimizer,
    critic: ModelWithOptimizer | None,
    folder: Path,
    *,
    everything: bool,
    with_optimizer: bool,
) -> None:
    """Read the checkpoint ``folder`` into fresh models and optimizers.

    With ``everything``, the critic is read too, and the random state if the checkpoint's model-parallel layout is the
    same; otherwise neither is read.  Without ``with_optimizer``, the optimizers start with fresh state.  The settings
    of the optimizers (learning rates, weight decay, betas) stay as they are.  Raises CheckpointFailed.
    """
    critic = critic if everything else None
    state = _sharded_learners(policy, critic, with_optimizer=with_optimizer, host=None)
    if with_optimizer:
        _ask_for_parts(policy, state)
        if critic is not None:
            _ask_for_parts(critic, state["critic"])
    try:
        known = load_sharded_metadata(str(folder))
        _check_words(folder, known, policy.model.vocab_size)
        _leave_extra_state(state, *([] if critic is None else [state["critic"]]))
        if not (everything and _has(known, state["random"])):
            del state["random"]
        found = dist_checkpointing.load(state, str(folder))
        _take(policy, found, with_optimizer=with_optimizer)
        if critic is not None:
            _take(critic, found["critic"], with_optimizer=with_optimizer)
    except CheckpointException as error:  # torch's, with the errors of all ranks; it is a BaseException
        raise CheckpointFailed(f"{folder} cannot be loaded: {_why(_cause(error))}") from error
    except (
        CheckpointingException,
        KeyError,
        ValueError,
        RuntimeError,
        OSError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise CheckpointFailed(f"{folder} cannot be loaded: {_why(error)}") from error
    if "random" in found:
        _set_random_state(found["random"])


def _sharded_learners(
    policy: ModelWithOptimizer,
    critic: ModelWithOptimizer | None,
    *,
    with_optimizer: bool,
    host: CheckpointMemory | None,
) -> dict[str, Any]:
    """Return the state of ``sharded_state``: to save it with ``host``, or to load a checkpoint into it without."""
    state = _sharded(policy, "policy", with_optimizer=with_optimizer, host=host)
    state["random"] = _sharded_random_state()
    if critic is not None:
        state["critic"] = _sharded(critic, "critic", with_optimizer=with_optimizer, host=host)
        add_prefix_for_sharding(state["critic"], "critic.")
    return state


def _sharded(
    learner: ModelWithOptimizer, name: str, *, with_optimizer: bool, host: CheckpointMemory | None
) -> dict[str, Any]:
    state = sharded_weights(learner.model)
    if not with_optimizer:
        return state
    _make_adam_state(learner.optimizer)
    with _gathered_in(host, learner.optimizer, name) if host is not None else nullcontext():
        state["optimizer"] = learner.optimizer.sharded_state_dict(
            state["model"], is_loading=host is None, metadata=_metadata()
        )
    return state


@contextmanager
def _gathered_in(host: CheckpointMemory, optimizer: Any, name: str) -> Iterator[None]:
    """Gather the states of distributed optimizers with ``Gathering``, in place of Megatron's method."""
    parts = {place: each for place, each in optimizers(optimizer).items() if isinstance(each, DistributedOptimizer)}
    for place, part in parts.items():
        gathering = Gathering(part, (name, place), host)
        part.sharded_param_state_fully_reshardable = lambda state, *_, gathering=gathering: gathering.state(state)
    try:
        yield
    finally:
        for part in parts.values():
            del part.sharded_param_state_fully_reshardable


def _metadata() -> dict[str, Any]:
    """Return the metadata of sharded states: formats that another number of ranks can read."""
    return {
        "distrib_optim_sharding_type": _SHARDING,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


@contextmanager
def _without_head(model: Any) -> Iterator[None]:
    """Hide from Megatron that a critic has no output layer, which it expects on the last pipeline stage."""
    is_last = model.post_process
    try:
        model.post_process = is_last and getattr(model, "output_layer", None) is not None
        yield
    finally:
        model.post_process = is_last


def _take(learner: ModelWithOptimizer, found: dict[str, Any], *, with_optimizer: bool) -> None:
    own = {name: each for name, each in learner.model.state_dict().items() if _is_extra(name)}
    learner.model.load_state_dict({**found["model"], **own})
    if with_optimizer:
        _load_optimizer(learner.optimizer, found["optimizer"], found[_PARTS])
    else:
        learner.optimizer.reload_model_params()  # updates its float32 copies of the weights


def _leave_extra_state(*states: dict[str, Any]) -> None:
    """Remove the layers' extra state, which TransformerEngine's layers have and Megatron's may lack.

    It is empty without fp8.
    """
    for state in states:
        state["model"] = {name: each for name, each in state["model"].items() if not _is_extra(name)}


def _is_extra(name: str) -> bool:
    return name.endswith("_extra_state")


def _has(known: dict[str, Any], part: ShardedObject) -> bool:
    return part.unique_key in {getattr(each, "unique_key", None) for each in known.values()}


def _check_words(folder: Path, known: dict[str, Any], num_words: int) -> None:
    """Raise CheckpointFailed if the checkpoint's vocabulary is smaller than the model's.

    Megatron would pad the embeddings with zeros.  Every rank checks both matrices, even if it has neither, so that
    either all ranks raise or none.
    """
    for key in _WORDS:
        if key in known and (there := known[key].global_shape[0]) < num_words:
            raise CheckpointFailed(
                f"{folder} cannot be loaded: {key} has {there} rows, less than the model's vocabulary size {num_words}"
            )


# ---- optimizer


def _ask_for_parts(learner: ModelWithOptimizer, state: dict[str, Any]) -> None:
    """Move the optimizer's state to the key ``parts``, by the index of its member.

    Megatron has no indices if there is only one member.
    """
    optimizer = state.pop("optimizer")
    state[_PARTS] = {0: optimizer} if len(members(learner.optimizer)) == 1 else optimizer


def _load_optimizer(optimizer: Any, common: object, tensors: dict[int, dict[str, Any]]) -> None:
    """Load each member's ``tensors``, and the step that ``common`` has, into ``optimizer``.

    ``common`` is the state that is not in tensors, as rank 0 saved it.  The number of members in it, and their
    parameter groups, depend on the layout: where ranks share the experts, Megatron has a separate optimizer for them.
    All members have taken the same number of steps.
    """
    step = max(_steps(common), default=0)  # a member without parameters on rank 0 has counted none
    for place, part in optimizers(optimizer).items():
        if part.optimizer.state:  # a member without parameters on this rank has none, and nothing in the checkpoint
            part.load_state_dict(_part_state(part, tensors[place], step))
    place_steps(optimizer)


def _part_state(part: Any, tensors: dict[str, Any], step: int) -> dict[str, Any]:
    """Build the argument of the member's ``load_state_dict``: its present settings, ``tensors``, and ``step``."""
    state: dict[str, Any] = part.state_dict()
    inner = state.get("optimizer", state)
    is_distributed, is_torchs = isinstance(part, DistributedOptimizer), isinstance(part.optimizer, torch.optim.AdamW)
    if is_distributed:
        state |= {"param_state": tensors["param_state"], "param_state_sharding_type": _SHARDING}
        part._set_main_param_and_optimizer_states = partial(_set_states, part)  # noqa: SLF001
    else:
        inner["state"] = dict(tensors.get("optimizer", tensors)["state"])
        state |= {name: finer for name, finer in tensors.items() if name == "fp32_from_fp16_params"}
    if is_torchs and not is_distributed:
        inner["state"]["common_step"] = torch.tensor(float(step))
    else:
        for group in inner["param_groups"]:
            group["step"] = step
    return state


def _steps(common: object) -> Iterator[int]:
    """Yield every step count in the state of an optimizer that is not in tensors; none before its first step."""
    if isinstance(common, dict):
        yield from (int(common[name]) for name in ("step", "common_step") if common.get(name) is not None)
        common = list(common.values())
    if isinstance(common, list | tuple):
        for each in common:
            yield from _steps(each)


@torch.no_grad()
def _set_states(part: DistributedOptimizer, model_param: Any, tensors: dict[str, Any]) -> None:
    """Copy ``tensors`` into the optimizer, in place of Megatron's method.

    Megatron's method expects the ``step`` of torch's AdamW among the tensors, where it never is.
    """
    group, place = part.model_param_group_index_map[model_param]
    main = part.optimizer.param_groups[group]["params"][place]
    for name, target in {"param": main, **part.optimizer.state[main]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _make_adam_state(optimizer: Any) -> None:
    """Create the state that Adam otherwise creates in its first step.

    A policy may have had no step yet, if the critic's training began alone.  The distributed optimizer's ``state_dict``
    asserts that the state exists.
    """
    for part in optimizers(optimizer).values():
        if not isinstance(part.optimizer, torch.optim.AdamW):  # TransformerEngine's, which Megatron can initialize
            part.init_state_fn(part.optimizer, part.config)
    for adam in adams(optimizer):
        for parameter in _parameters(adam):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    for part in optimizers(optimizer).values():
        is_torchs = isinstance(part.optimizer, torch.optim.AdamW)
        if is_torchs and isinstance(part, DistributedOptimizer) and not part.optimizer.state:
            part.state_dict = partial(_settings_alone, part)


def _settings_alone(part: DistributedOptimizer) -> dict[str, Any]:
    """Do what ``state_dict`` does, for a member without parameters on this rank.  It has counted no steps.

    A pipeline stage of dense layers alone has such a member for the experts.  Megatron's method asserts that there is
    a step (megatron-core 0.19, distrib_optimizer.py, state_dict).
    """
    groups = part.optimizer.state_dict()["param_groups"]
    return {"optimizer": {"param_groups": [{**_without_params(group), "step": 0.0} for group in groups]}}


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


# ---- random state


def _sharded_random_state() -> ShardedObject:
    """Return the random state, one for each model-parallel rank; data-parallel ranks have the same."""
    return ShardedObject(
        "random",
        _random_state(),
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "trackers": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["trackers"])


def _cause(error: CheckpointException) -> BaseException:
    """Return the error that one of the ranks raised."""
    return next((cause for cause, _ in error.failures.values()), error)


def _why(error: BaseException) -> str:
    line = first_line(error)
    if len(line) > LONGEST_LINE:
        line = line[:LONGEST_LINE] + " ..."
    return _NO_STATE if _MISSING_STATE.search(line) else line
