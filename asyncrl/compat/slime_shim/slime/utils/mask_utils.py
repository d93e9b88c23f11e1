"""The loss mask of chat messages."""

from collections.abc import Sequence
from typing import Any

__all__ = ["get_response_lengths"]

LAZY = ("MultiTurnLossMaskGenerator",)
"""Names that are imported when they are asked for, because few files do."""


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return for each mask the number of entries from its first 1 on; 0 without one."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


def __getattr__(name: str) -> Any:
    if name in LAZY:
        from asyncrl.data import loss_masks  # type: ignore[attr-defined,unused-ignore]

        return getattr(loss_masks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
