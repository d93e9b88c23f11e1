"""The check of all names inside Megatron and torch that a trainer rank relies on."""

import functools

from asyncrl.engines.abandoned import INTERNALS as GROUPS
from asyncrl.engines.megatron.attention import INTERNALS as ATTENTION
from asyncrl.engines.megatron.checkpoint import INTERNALS as CHECKPOINT
from asyncrl.engines.megatron.fused import INTERNALS as FUSED
from asyncrl.engines.megatron.handles import INTERNALS as HANDLES
from asyncrl.engines.megatron.implementation import INTERNALS as IMPLEMENTATION
from asyncrl.engines.megatron.layers import INTERNALS as LAYERS
from asyncrl.engines.megatron.learner import INTERNALS as LEARNER
from asyncrl.engines.megatron.model import INTERNALS as MODEL
from asyncrl.engines.megatron.outbox import INTERNALS as OUTBOX
from asyncrl.engines.megatron.passes import INTERNALS as PASSES
from asyncrl.engines.megatron.stash import INTERNALS as STASH
from asyncrl.engines.megatron.state import INTERNALS as STATE
from asyncrl.engines.megatron.update_group import INTERNALS as UPDATE_GROUP
from asyncrl.engines.megatron.weights import INTERNALS as WEIGHTS
from asyncrl.internals import check_internals

TRAINER = (
    *ATTENTION,
    *CHECKPOINT,
    *FUSED,
    *GROUPS,
    *HANDLES,
    *IMPLEMENTATION,
    *LAYERS,
    *LEARNER,
    *MODEL,
    *OUTBOX,
    *PASSES,
    *STASH,
    *STATE,
    *UPDATE_GROUP,
    *WEIGHTS,
)


@functools.cache
def check_trainer_internals() -> None:
    """Raise InternalsChanged unless Megatron and torch look as expected.  Once per process; takes 20 ms.

    Call before ``emulate_cuda``, which puts stand-ins in the place of some names.
    """
    check_internals(TRAINER)
