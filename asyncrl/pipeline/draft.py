"""A sample while it is being written: tokens, log-probs and which weights wrote which."""

from collections.abc import Mapping

from asyncrl.types import Chunk, FinishReason, Sample, Span, Weights


class Draft:
    """Grows chunk by chunk; becomes a ``Sample`` once.  The only mutable value in the flow, and it never leaves it."""

    def __init__(self, index: int, pushed: Mapping[int, Weights]) -> None:
        """``pushed`` maps every version that can be seen in a chunk to its weights; it may grow later."""
        self.index = index
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[Span] = []
        self._pushed = pushed

    def extend(self, chunk: Chunk) -> None:
        """Append a chunk; its tokens lengthen the last span when the same weights wrote them."""
        start, stop = len(self.token_ids), len(self.token_ids) + len(chunk.token_ids)
        if start == stop:
            return
        self.token_ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        weights = self._pushed[chunk.version]
        if self._spans and self._spans[-1].weights == weights:
            start = self._spans.pop().start
        self._spans.append(Span(weights=weights, start=start, stop=stop))

    def finish(self, text: str, reason: FinishReason, seconds: float) -> Sample:
        """The finished sample."""
        return Sample(
            index=self.index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            spans=tuple(self._spans),
            text=text,
            finish=reason,
            seconds=seconds,
        )
