"""A sample while it is being written: tokens, log-probs and which weights wrote which."""

from array import array
from collections.abc import Mapping, Sequence

from asyncrl.types import Chunk, FinishReason, Floats, Sample, Span, Weights


class PartialSample:
    """Grows chunk by chunk; becomes a ``Sample`` once.  The only mutable value in the flow, and it never leaves it."""

    def __init__(self, index: int, published: Mapping[int, Weights]) -> None:
        """``published`` maps every version that can be seen in a chunk to its weights; it may grow later."""
        self.index = index
        self.num_tokens = 0
        self.resumed_at = 0
        """Tokens that were there when the sample last went on after an interruption."""
        self._tokens: list[tuple[int, ...]] = []
        self._logprobs: Floats = array("f")
        self._spans: list[Span] = []
        self._published = published

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What is written so far."""
        if len(self._tokens) != 1:
            self._tokens = [_joined(self._tokens)]  # joined once, not at each look
        return self._tokens[0]

    def extend(self, chunk: Chunk) -> None:
        """Append a chunk; its tokens lengthen the last span when the same weights wrote them."""
        start, stop = self.num_tokens, self.num_tokens + len(chunk.token_ids)
        if start == stop:
            return
        self.num_tokens = stop
        self._tokens.append(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        weights = self._published[chunk.version]
        if self._spans and self._spans[-1].weights == weights:
            start = self._spans.pop().start
        self._spans.append(Span(weights=weights, start=start, stop=stop))

    def resumed(self) -> "PartialSample":
        """A copy that goes on from here; what still arrives for this one does not reach it."""
        copy = PartialSample(self.index, self._published)
        copy.num_tokens = copy.resumed_at = self.num_tokens
        copy._tokens, copy._logprobs, copy._spans = [*self._tokens], self._logprobs[:], [*self._spans]
        return copy

    def finish(self, text: str, reason: FinishReason, seconds: float) -> Sample:
        """The finished sample."""
        return Sample(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=self._logprobs[:],
            spans=tuple(self._spans),
            text=text,
            finish=reason,
            seconds=seconds,
        )


def _joined(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """A list grows by copies of memory; an iterator over all parts takes three times as long."""
    whole: list[int] = []
    for part in parts:
        whole += part
    return tuple(whole)
