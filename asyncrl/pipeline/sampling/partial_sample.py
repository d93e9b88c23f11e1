"""A sample that is still being generated: tokens, their columns, and the weights that generated each token."""

from array import array
from collections.abc import Mapping, Sequence

from asyncrl.errors import EngineLost
from asyncrl.token_columns import Routes, TokenSets, completed, joined_sets
from asyncrl.types import Chunk, FinishReason, Floats, GroupId, Sample, Span, Weights


class PartialSample:
    """A sample that grows chunk by chunk until ``finish``.  No other value in the flow is mutable."""

    def __init__(
        self,
        index: int,
        published: Mapping[int, Weights],
        group_id: GroupId | None = None,
        routes_from: int | None = None,
    ) -> None:
        """Start empty.  ``published`` maps every version that a chunk can name to its weights; it may grow.

        ``routes_from`` is the first position whose route is wanted; None wants no routes.
        """
        self.index = index
        self.group_id = group_id
        self.num_tokens = 0
        self.resumed_at = 0
        """Number of tokens when the sample was last resumed."""
        self.ended: FinishReason | None = None
        """The reason for which a restored answer has ended; None: it may continue."""
        self._tokens: list[tuple[int, ...]] = []
        self._logprobs: Floats = array("f")
        self._spans: list[Span] = []
        self._kept: list[tuple[int, TokenSets | None]] = []
        self._top: list[tuple[int, TokenSets | None]] = []
        self._routes: list[Routes] = []
        self.last: tuple[Chunk, Weights] | None = None
        """The chunk that came last, and the weights that generated it; None before the first."""
        self.routes_from = routes_from
        """First position whose route is wanted and has not come."""
        self._published = published

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens generated so far."""
        if len(self._tokens) != 1:
            self._tokens = [_joined(self._tokens)]  # joined once, not at every access
        return self._tokens[0]

    def extend(self, chunk: Chunk, weights: Weights | None = None) -> None:
        """Append a chunk; its tokens extend the last span if the same weights generated them.

        ``weights`` generated the chunk; None: those of its version.  Raises EngineLost, with the sample unchanged, for
        a version that was never published.
        """
        # Invariant: looked up before anything changes.  The request is sent again after the tokens that are here.
        if weights is None and (weights := self._published.get(chunk.version)) is None:
            raise EngineLost(f"an engine names weight version {chunk.version}, which was never published")
        self.last = chunk, weights
        if chunk.routes is not None and self.routes_from is not None:
            self._routes.append(chunk.routes)
            self.routes_from += len(chunk.routes)
        start, stop = self.num_tokens, self.num_tokens + len(chunk.token_ids)
        if start == stop:
            return
        self.num_tokens = stop
        self._tokens.append(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        self._kept.append((stop - start, chunk.kept))
        self._top.append((stop - start, chunk.top))
        if self._spans and self._spans[-1].weights == weights:
            start = self._spans.pop().start
        self._spans.append(Span(weights=weights, start=start, stop=stop))

    def resumed(self) -> "PartialSample":
        """Return a copy to resume from; chunks that still arrive for this sample do not reach the copy."""
        copy = PartialSample(self.index, self._published, self.group_id, self.routes_from)
        copy.num_tokens = copy.resumed_at = self.num_tokens
        copy.ended = self.ended
        copy._tokens, copy._logprobs, copy._spans = [*self._tokens], self._logprobs[:], [*self._spans]
        copy._kept, copy._top, copy._routes = [*self._kept], [*self._top], [*self._routes]
        return copy

    @property
    def routes(self) -> Routes | None:
        """The routes that came; None if none did."""
        return Routes.joined(self._routes) if self._routes else None

    def finish(self, text: str, reason: FinishReason, seconds: float, prompt_len: int | None = None) -> Sample:
        """Return the finished sample, with routes if ``prompt_len`` is given and they begin with the prompt."""
        num_positions = None if prompt_len is None else prompt_len + self.num_tokens - 1
        return Sample(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=self._logprobs[:],
            spans=tuple(self._spans),
            text=text,
            finish=reason,
            seconds=seconds,
            group_id=self.group_id,
            resumed_at=self.resumed_at,
            kept=joined_sets(self._kept),
            top=joined_sets(self._top),
            routes=None if num_positions is None else completed(self._routes, num_positions),
        )


def _joined(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    # Extending a list copies memory; an iterator over all parts takes three times as long.
    whole: list[int] = []
    for part in parts:
        whole += part
    return tuple(whole)
