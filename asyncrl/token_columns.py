"""Columns per token besides ids and log-probs: the experts that tokens were routed to, and sets of ids.

Arrays are numpy's, because Ray hands them to trainer ranks without a copy.  Treat them as immutable.
Shape letters: N positions of a sample's input, T tokens, L mixture layers, K experts per token, I ids of all sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITIONS = (0, 1_024, 4_096, 16_384, 65_536)
"""First response tokens of the ranges by which numbers of tokens are split."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The experts that an engine chose at consecutive input positions.

    Position p is that of the token from which token p + 1 is predicted.  A sample of P prompt and T response tokens
    therefore has P + T - 1 positions, and the route of response token t is the row P + t - 1.
    """

    experts_NLK: NDArray[Any]
    """Expert ids per mixture layer, from the first such layer on, uint8 or uint16; dense layers have no rows.  The K
    ids of a row are distinct."""
    missing: tuple[tuple[int, int], ...] = ()
    """Ranges of positions (start, stop) whose rows mean nothing, in order: the router chooses for itself there."""

    def __post_init__(self) -> None:
        if self.experts_NLK.ndim != 3 or self.experts_NLK.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"routes are uint8 or uint16 of three dimensions, got {self.experts_NLK.dtype}")
        edges = [0, *(edge for each in self.missing for edge in each), len(self)]
        if any(left > right for left, right in pairwise(edges)):
            raise ValueError(f"missing rows {self.missing} are not in order within {len(self)} positions")

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.experts_NLK)

    def __eq__(self, other: object) -> bool:
        """Compare all rows."""
        if not isinstance(other, Routes):
            return NotImplemented
        return self.missing == other.missing and np.array_equal(self.experts_NLK, other.experts_NLK)

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_missing(self) -> int:
        """Number of positions whose rows mean nothing."""
        return sum(stop - start for start, stop in self.missing)

    def part(self, start: int, stop: int) -> "Routes":
        """Return the rows of the positions ``start`` to ``stop`` (exclusive)."""
        cut = ((max(start, first) - start, min(stop, last) - start) for first, last in self.missing)
        missing = tuple((first, last) for first, last in cut if first < last)
        return Routes(experts_NLK=self.experts_NLK[start:stop], missing=missing)

    @classmethod
    def joined(cls, parts: Sequence["Routes"]) -> "Routes":
        """Concatenate consecutive parts, at least one.  Raises ValueError if their layers or experts differ."""
        if len(parts) == 1:
            return parts[0]
        missing: list[tuple[int, int]] = []
        begin = 0
        for part in parts:
            for start, stop in part.missing:
                if missing and missing[-1][1] == begin + start:
                    missing[-1] = (missing[-1][0], begin + stop)
                else:
                    missing.append((begin + start, begin + stop))
            begin += len(part)
        return cls(experts_NLK=np.concatenate([part.experts_NLK for part in parts]), missing=tuple(missing))

    @classmethod
    def unknown(cls, num_positions: int, like: "Routes") -> "Routes":
        """Return ``num_positions`` missing rows with the layers and experts of ``like``."""
        rows = np.zeros((num_positions, *like.experts_NLK.shape[1:]), like.experts_NLK.dtype)
        return cls(experts_NLK=rows, missing=((0, num_positions),) if num_positions else ())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSets:
    """One set of token ids for each of T generated tokens, such as the ids that top-p kept."""

    counts_T: NDArray[np.int32]
    """Size of each token's set; 0: unknown."""
    ids_I: NDArray[np.int32]
    """The sets one after another."""
    logprobs_I: NDArray[np.float32] | None = None
    """Log-prob of each id under the policy that sampled; None: not asked for."""

    def __post_init__(self) -> None:
        total = int(self.counts_T.sum())
        if total != len(self.ids_I) or (self.logprobs_I is not None and total != len(self.logprobs_I)):
            raise ValueError(f"sets of {total} ids in all have {len(self.ids_I)} ids")

    @property
    def tokens_I(self) -> NDArray[np.int64]:
        """The token of each id."""
        return np.repeat(np.arange(len(self)), self.counts_T)

    def __len__(self) -> int:
        """Return the number of sets."""
        return len(self.counts_T)

    def __eq__(self, other: object) -> bool:
        """Compare all ids and log-probs."""
        if not isinstance(other, TokenSets):
            return NotImplemented
        return (
            np.array_equal(self.counts_T, other.counts_T)
            and np.array_equal(self.ids_I, other.ids_I)
            and np.array_equal(self.logprobs_I, other.logprobs_I)  # type: ignore[arg-type]  # two None are equal
        )

    __hash__ = None  # type: ignore[assignment]

    def part(self, start: int, stop: int) -> "TokenSets":
        """Return the sets of the tokens ``start`` to ``stop`` (exclusive)."""
        first, last = int(self.counts_T[:start].sum()), int(self.counts_T[:stop].sum())
        logprobs = None if self.logprobs_I is None else self.logprobs_I[first:last]
        return TokenSets(counts_T=self.counts_T[start:stop], ids_I=self.ids_I[first:last], logprobs_I=logprobs)

    def take(self, places: NDArray[np.int64]) -> "TokenSets":
        """Return the sets of some tokens, which are in ascending order."""
        is_taken = np.zeros(len(self), np.bool_)
        is_taken[places] = True
        is_there = np.repeat(is_taken, self.counts_T)
        logprobs = None if self.logprobs_I is None else self.logprobs_I[is_there]
        return TokenSets(counts_T=self.counts_T[places], ids_I=self.ids_I[is_there], logprobs_I=logprobs)

    def within(self, others: "TokenSets") -> "TokenSets":
        """Return the ids of each set that are also in the set of ``others`` for the same token."""
        is_in = np.isin(_keys(self), _keys(others))
        counts = np.bincount(self.tokens_I[is_in], minlength=len(self)).astype(np.int32)
        logprobs = None if self.logprobs_I is None else self.logprobs_I[is_in]
        return TokenSets(counts_T=counts, ids_I=self.ids_I[is_in], logprobs_I=logprobs)

    def shifted(self, by_T: NDArray[np.float32]) -> "TokenSets":
        """Return the sets with a number for each token added to its log-probs."""
        assert self.logprobs_I is not None, "only log-probs can be shifted"
        logprobs = self.logprobs_I + np.repeat(by_T, self.counts_T)
        return TokenSets(counts_T=self.counts_T, ids_I=self.ids_I, logprobs_I=logprobs)

    @classmethod
    def joined(cls, parts: Sequence["TokenSets"]) -> "TokenSets":
        """Concatenate the sets of consecutive tokens, at least one part; all have log-probs, or none has."""
        if len(parts) == 1:
            return parts[0]
        logprobs = [part.logprobs_I for part in parts if part.logprobs_I is not None]
        if len(logprobs) not in (0, len(parts)):
            raise ValueError("only some of the sets have log-probs")
        return cls(
            counts_T=np.concatenate([part.counts_T for part in parts]),
            ids_I=np.concatenate([part.ids_I for part in parts]),
            logprobs_I=np.concatenate(logprobs) if logprobs else None,
        )

    @classmethod
    def unknown(cls, num_tokens: int, *, has_logprobs: bool = False) -> "TokenSets":
        """Return empty sets for tokens whose sets are unknown, or that the policy did not write."""
        return cls(
            counts_T=np.zeros(num_tokens, np.int32),
            ids_I=np.zeros(0, np.int32),
            logprobs_I=np.zeros(0, np.float32) if has_logprobs else None,
        )


def completed(parts: Sequence[Routes], num_positions: int) -> Routes | None:
    """Return the routes of the first ``num_positions`` positions, of which ``parts`` are the first.

    The rest is missing.  Returns None if there are no parts.
    """
    if not parts:
        return None
    routes = Routes.joined(parts)
    if len(routes) < num_positions:
        return Routes.joined([routes, Routes.unknown(num_positions - len(routes), routes)])
    return routes if len(routes) == num_positions else routes.part(0, num_positions)


def joined_sets(parts: Sequence[tuple[int, TokenSets | None]]) -> TokenSets | None:
    """Concatenate the sets of consecutive parts, each with its number of tokens; the sets of a part may be unknown.

    Returns None if no part has sets.
    """
    first = next((sets for _, sets in parts if sets is not None), None)
    if first is None:
        return None
    has_logprobs = first.logprobs_I is not None
    return TokenSets.joined(
        [
            TokenSets.unknown(num_tokens, has_logprobs=has_logprobs) if sets is None else sets
            for num_tokens, sets in parts
        ]
    )


def _keys(sets: TokenSets) -> NDArray[np.int64]:
    """Return a number for each id and its token; ids are below 2**31."""
    return sets.tokens_I * 2**31 + sets.ids_I
