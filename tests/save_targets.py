"""Checkpoints that a test writes: their folder is claimed by the test's process, as a run claims its ``--save``."""

from functools import cache
from pathlib import Path

from asyncrl.engines.megatron.checkpoint.lease import Claim, take
from asyncrl.engines.megatron.checkpoint.writes import Target


@cache
def claim(root: Path) -> Claim:
    """Claim ``root``, once in this process."""
    root.mkdir(parents=True, exist_ok=True)
    return take(root, say=lambda line: None)


def target(root: Path, step: int, keep: int | None = None) -> Target:
    """The checkpoint after ``step`` steps in ``root``."""
    return Target(claim=claim(root), step=step, keep=keep)
