"""The adapters for plug-ins with slime's signatures.

Plug-ins import ``Sample``, ``DynamicFilterOutput`` and ``RolloutFnEvalOutput`` from here.
"""

from asyncrl.compat.advantage_functions import advantage_from_slime
from asyncrl.compat.buffer_filters import pick_from_slime
from asyncrl.compat.data_sources import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from asyncrl.compat.evaluation import BlockingEval, RolloutFnEvalOutput
from asyncrl.compat.plugin_shapes import filter_from_slime, group_reward_from_slime, reward_from_slime
from asyncrl.compat.slime_path import provide_slime
from asyncrl.compat.slime_sample import Sample
from asyncrl.compat.slime_types import OUR_NAMES, DynamicFilterOutput, SlimeArgs
from asyncrl.compat.tis_functions import tis_from_slime

__all__ = [
    "OUR_NAMES",
    "BlockingEval",
    "DataSource",
    "DynamicFilterOutput",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "RolloutFnEvalOutput",
    "Sample",
    "SlimeArgs",
    "advantage_from_slime",
    "filter_from_slime",
    "group_reward_from_slime",
    "pick_from_slime",
    "provide_slime",
    "reward_from_slime",
    "tis_from_slime",
]
