"""The buffer of scored groups: training order, deadlines and token age."""

from asyncrl.buffer.ages import masked_before, masked_in, masked_until
from asyncrl.buffer.batches import Dispatch, NotYet, Outstanding

__all__ = ["Dispatch", "NotYet", "Outstanding", "masked_before", "masked_in", "masked_until"]
