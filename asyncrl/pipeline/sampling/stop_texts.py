"""Stop strings across the attempts of one answer.

An engine compares stop strings with the tokens of the present request alone.  An answer that was interrupted inside a
stop string would therefore never end there:

    stop "</calc>"      first attempt   ... <calc>2 + 3</ca│            second attempt   │lc> = 6, so ...
"""

from collections.abc import Callable
from dataclasses import replace

from asyncrl.types import Chunk

type Decode = Callable[[tuple[int, ...]], str]
"""Returns the text of tokens."""


def has_stop(written: tuple[int, ...], stop: tuple[str, ...], decode: Decode) -> bool:
    """Return whether the last tokens of an answer hold a stop string."""
    text = decode(_last(written, stop))
    return any(each in text for each in stop)


class DividedStop:
    """Finds a stop string that begins in the tokens of earlier attempts and ends in those of the present one."""

    def __init__(self, written: tuple[int, ...], stop: tuple[str, ...], decode: Decode) -> None:
        """``written`` are the tokens of earlier attempts, without a whole stop string."""
        self._stop = stop
        self._decode = decode
        self._tokens = _last(written, stop)
        self._num_left = _longest(stop) - 1 if written else 0
        """Tokens of the present attempt that may still belong to such a stop string."""

    def cut(self, chunk: Chunk) -> Chunk | None:
        """Return the chunk up to the token that completes a stop string; None if none does."""
        for size, token in enumerate(chunk.token_ids[: max(0, self._num_left)], start=1):
            self._tokens += (token,)
            text = self._decode(self._tokens)
            if any(each in text for each in self._stop):
                return _first(chunk, size)
        self._num_left -= len(chunk.token_ids)
        return None


def _last(written: tuple[int, ...], stop: tuple[str, ...]) -> tuple[int, ...]:
    return written[-max(1, _longest(stop)) :]


def _longest(stop: tuple[str, ...]) -> int:
    """Return the most tokens that a stop string can have: each has at least one byte."""
    return max((len(each.encode()) for each in stop), default=0)


def _first(chunk: Chunk, size: int) -> Chunk:
    """Return the first ``size`` tokens of a chunk."""
    num_cut = len(chunk.token_ids) - size
    if num_cut == 0:
        return chunk
    num_routes = 0 if chunk.routes is None else max(0, len(chunk.routes) - num_cut)
    return replace(
        chunk,
        token_ids=chunk.token_ids[:size],
        logprobs=chunk.logprobs[:size],
        routes=None if chunk.routes is None or not num_routes else chunk.routes.part(0, num_routes),
        kept=None if chunk.kept is None else chunk.kept.part(0, size),
        top=None if chunk.top is None else chunk.top.part(0, size),
    )
