"""The trainer: Megatron-core behind one plain class, ``rank.MegatronRank``, which is not imported here.

The names exported here import neither torch nor Megatron, so that a configuration can be checked before anything
starts.
"""

from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.models.shape import read_shape

__all__ = ["UNUSED_ON_CPU", "TrainerSettings", "WeightBucket", "read_shape"]

UNUSED_ON_CPU = ("flash_attn", "flashinfer", "wandb")
"""Libraries that Megatron imports if it can, and that a trainer on a CPU does not use: 2 s of CPU time."""
