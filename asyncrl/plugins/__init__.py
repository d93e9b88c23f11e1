"""User functions, given by path on the command line: imported and checked before anything starts."""

from asyncrl.plugins.algorithms import load_custom
from asyncrl.plugins.eval_kind import EVAL
from asyncrl.plugins.kinds import ADVANTAGE, KEEP, LOSS, PICK, REWARD, Kind
from asyncrl.plugins.resolve import load_plugin

__all__ = ["ADVANTAGE", "EVAL", "KEEP", "LOSS", "PICK", "REWARD", "Kind", "load_custom", "load_plugin"]
