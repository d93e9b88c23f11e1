"""The tokens of simulated answers: pure functions of a seed and a place."""

import hashlib

PROMPT_TOKENS = 3
STOP = 63
"""The token that ends every answer which the limit does not cut."""
UNKNOWN = 900_001
"""A weight version that no run publishes."""
MIXED = -1
"""The step of weights that are a mix of two versions; a token from them is an error of the run."""


def length_of(seed: int, longest: int) -> int:
    """Return the tokens of the answer that a seed gives without a limit."""
    return 1 + seed % longest


def token_of(seed: int, place: int, longest: int) -> int:
    """Return token ``place`` of an answer."""
    if place == length_of(seed, longest) - 1:
        return STOP
    return hashlib.blake2b(b"%d:%d" % (seed, place), digest_size=1).digest()[0] % STOP
