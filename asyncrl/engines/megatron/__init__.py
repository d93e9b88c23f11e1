"""Who makes weights: Megatron-core behind one plain class, ``rank.MegatronRank``, which is not imported here.

These names import neither torch nor Megatron, so that a configuration can be checked before anything starts.
"""

from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.megatron.settings import TrainerSettings
from asyncrl.engines.megatron.shape import read_shape

__all__ = ["TrainerSettings", "WeightBucket", "read_shape"]
