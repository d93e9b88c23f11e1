"""User functions, named by path on the command line: found, imported and checked before anything starts."""

from asyncrl.plugins.kinds import KEEP, PICK, REWARD, Kind
from asyncrl.plugins.load import load_plugin

__all__ = ["KEEP", "PICK", "REWARD", "Kind", "load_plugin"]
