"""What waits, and in which order."""

from asyncrl.buffer.batches import Due, all_in_time, choose

__all__ = ["Due", "all_in_time", "choose"]
