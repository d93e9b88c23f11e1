"""slime's names for the pieces of an answer that a context-parallel rank has.

Here user functions get whole answers on every rank, so both functions return what they are given.
"""

from typing import Any


def all_gather_with_cp(tensor: Any, total_length: int, response_length: int) -> Any:
    """Return the values of all response tokens of one answer."""
    return tensor


def slice_log_prob_with_cp(log_prob: Any, total_length: int, response_length: int) -> Any:
    """Return the values of the response tokens that this rank trains on: all of them.

    Raises ValueError if there is not one value per response token.
    """
    if len(log_prob) != response_length:
        raise ValueError(f"{len(log_prob)} values for {response_length} response tokens of {total_length} tokens")
    return log_prob
