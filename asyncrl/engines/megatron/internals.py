"""The check of all names inside Megatron and torch that a trainer rank relies on."""

import functools

from asyncrl.engines.listening import INTERNALS as LISTENING
from asyncrl.engines.megatron.checkpoint.checked_files import INTERNALS as CHECKED_FILES
from asyncrl.engines.megatron.checkpoint.gathered import INTERNALS as GATHERED
from asyncrl.engines.megatron.checkpoint.saver import INTERNALS as CHECKPOINT
from asyncrl.engines.megatron.checkpoint.state import INTERNALS as STATE
from asyncrl.engines.megatron.model.attention import INTERNALS as ATTENTION
from asyncrl.engines.megatron.model.attention_kernels import INTERNALS as KERNELS
from asyncrl.engines.megatron.model.build import INTERNALS as MODEL
from asyncrl.engines.megatron.model.experts import INTERNALS as EXPERTS
from asyncrl.engines.megatron.model.implementation import INTERNALS as IMPLEMENTATION
from asyncrl.engines.megatron.model.layers import INTERNALS as LAYERS
from asyncrl.engines.megatron.model.mixture import INTERNALS as MIXTURE
from asyncrl.engines.megatron.model.routing import INTERNALS as ROUTING
from asyncrl.engines.megatron.setup.fused_adam import INTERNALS as FUSED
from asyncrl.engines.megatron.setup.gloo_device import INTERNALS as GLOO
from asyncrl.engines.megatron.setup.gradient_norm import INTERNALS as GRADIENT_NORM
from asyncrl.engines.megatron.setup.pinned import INTERNALS as PINNED
from asyncrl.engines.megatron.train.forward_step import INTERNALS as FORWARD_STEP
from asyncrl.engines.megatron.train.learner import INTERNALS as LEARNER
from asyncrl.engines.megatron.train.offload import INTERNALS as OFFLOAD
from asyncrl.engines.megatron.weights.handles import INTERNALS as HANDLES
from asyncrl.engines.megatron.weights.hf_weights import INTERNALS as WEIGHTS
from asyncrl.engines.megatron.weights.update_group import INTERNALS as UPDATE_GROUP
from asyncrl.engines.megatron.weights.weight_sender import INTERNALS as WEIGHT_SENDER
from asyncrl.engines.weight_sync.group_abort import INTERNALS as GROUPS
from asyncrl.engines.weight_sync.part_groups import INTERNALS as PART_GROUPS
from asyncrl.internals import check_internals

TRAINER = (
    *ATTENTION,
    *CHECKED_FILES,
    *CHECKPOINT,
    *EXPERTS,
    *FORWARD_STEP,
    *FUSED,
    *GATHERED,
    *GLOO,
    *GRADIENT_NORM,
    *GROUPS,
    *HANDLES,
    *IMPLEMENTATION,
    *KERNELS,
    *LAYERS,
    *LEARNER,
    *LISTENING,
    *MIXTURE,
    *MODEL,
    *OFFLOAD,
    *PART_GROUPS,
    *PINNED,
    *ROUTING,
    *STATE,
    *UPDATE_GROUP,
    *WEIGHTS,
    *WEIGHT_SENDER,
)


@functools.cache
def check_trainer_internals() -> None:
    """Raise InternalsChanged unless Megatron and torch look as expected.  Runs once per process and takes 20 ms.

    Call it before ``emulate_cuda``, which replaces some of the names by stand-ins.
    """
    check_internals(TRAINER)
