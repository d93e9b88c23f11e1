"""User functions, given by path on the command line: imported and checked before anything starts."""

from asyncrl.plugins.algorithms import load_custom
from asyncrl.plugins.data_source import load_source
from asyncrl.plugins.eval_kind import EVAL
from asyncrl.plugins.hook_kinds import ALL_SAMPLES, CONVERT, EVAL_LOG, POST_PROCESS, ROLLOUT_LOG, SAMPLE_FILTER
from asyncrl.plugins.kinds import ADVANTAGE, KEEP, LOSS, PICK, REWARD, Kind
from asyncrl.plugins.resolve import load_plugin

__all__ = [
    "ADVANTAGE",
    "ALL_SAMPLES",
    "CONVERT",
    "EVAL",
    "EVAL_LOG",
    "KEEP",
    "LOSS",
    "PICK",
    "POST_PROCESS",
    "REWARD",
    "ROLLOUT_LOG",
    "SAMPLE_FILTER",
    "Kind",
    "load_custom",
    "load_plugin",
    "load_source",
]
