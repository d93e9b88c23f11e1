"""What waits to be trained, in which order, and how old it is."""

from asyncrl.buffer.ages import masked_before, oldest_trained
from asyncrl.buffer.batches import Due, NotYet, doomed, oldest, oldest_in_time, with_a_place

__all__ = [
    "Due",
    "NotYet",
    "doomed",
    "masked_before",
    "oldest",
    "oldest_in_time",
    "oldest_trained",
    "with_a_place",
]
