"""The gathered state of a distributed optimizer, next to the one that Megatron itself makes."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from asyncrl.engines.megatron.checkpoint import state
from asyncrl.engines.megatron.checkpoint.host_memory import CheckpointMemory
from asyncrl.engines.megatron.checkpoint.state import sharded_state
from asyncrl.engines.megatron.train.learner import Learner

Tensors = dict[tuple[str, tuple[int, ...]], ShardedTensor]
"""Sharded tensors by key and place."""


def sharded_tensors(of: dict[str, Any]) -> Tensors:
    return {(each.key, each.global_offset): each for each in nested_values(of) if isinstance(each, ShardedTensor)}


def gathered_as_by_megatron(learner: Learner, host: CheckpointMemory) -> Tensors:
    """Gather the state into ``host`` and return it.  Collective over all ranks.

    Raises AssertionError unless it equals Megatron's, wherever this rank writes it.
    """
    ours = sharded_tensors(sharded_state(learner, None, host, with_optimizer=True))
    whole = state.sharded_weights(learner.model)
    optimizer = learner.optimizer.sharded_state_dict(whole["model"], metadata=state._metadata())  # noqa: SLF001
    apply_factories(theirs := whole | {"optimizer": optimizer})
    assert set(ours) == set(sharded_tensors(theirs))
    for key, their in sharded_tensors(theirs).items():
        our = ours[key]
        assert (our.dtype, our.local_shape, our.global_shape, our.replica_id) == (
            their.dtype,
            their.local_shape,
            their.global_shape,
            their.replica_id,
        )
        if is_main_replica(their.replica_id):
            assert torch.equal(our.data, their.data), key
    return ours
