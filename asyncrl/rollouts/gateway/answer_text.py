"""The text of an answer, as SGLang's detokenizer would write it: stop texts trimmed, special tokens kept or not."""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.data.incremental_text import IncrementalText
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.episodes import GeneratedTurn
from asyncrl.rollouts.gateway.sampling import Asked
from asyncrl.types import Chunk, FinishReason

_BROKEN = "\ufffd"
"""The character for bytes that are no UTF-8, such as the first half of a character."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why an answer ended, and the stop token or stop text that it matched."""

    reason: FinishReason
    matched: int | str | None = None


class AnswerTexts:
    """Converts answers to texts."""

    def __init__(self, tokenizer: TextTokenizer, end_tokens: Sequence[int]) -> None:
        self.with_special_tokens = tokenizer.skipping(False)
        self._without_special_tokens = tokenizer.skipping(True)
        self._end_tokens = frozenset(end_tokens)

    def decoder(self, asked: Asked) -> TextTokenizer:
        """Return the tokenizer that decodes as the request asked."""
        return self._without_special_tokens if asked.skips_special_tokens else self.with_special_tokens

    def is_end(self, token_id: int, asked: Asked) -> bool:
        """Return whether the token ends an answer."""
        return token_id in self._end_tokens or token_id in asked.sampling.stop_token_ids

    def ending(self, turn: GeneratedTurn, asked: Asked) -> Ending:
        """Return how the turn ended."""
        if turn.finish is not FinishReason.STOP:
            return Ending(turn.finish)
        if turn.token_ids and self.is_end(turn.token_ids[-1], asked):
            return Ending(turn.finish, turn.token_ids[-1])
        if not asked.sampling.stop:
            return Ending(turn.finish)
        text = self.with_special_tokens.decode(turn.token_ids)
        return Ending(turn.finish, next((stop for stop in asked.sampling.stop if stop in text), None))

    def text(self, turn: GeneratedTurn, ending: Ending, asked: Asked) -> str:
        """Return the text of a whole turn."""
        token_ids = turn.token_ids
        if asked.keeps_stop:
            return self.decoder(asked).decode(token_ids)
        if isinstance(ending.matched, int):
            token_ids = token_ids[:-1]
        text = self.decoder(asked).decode(token_ids)
        return text.partition(ending.matched)[0] if isinstance(ending.matched, str) else text

    def raw(self, turn: GeneratedTurn, asked: Asked) -> tuple[str, str]:
        """Return the turn's text with special tokens but without its end token, and the text of that token."""
        token_ids = turn.token_ids
        if turn.finish is FinishReason.STOP and token_ids and self.is_end(token_ids[-1], asked):
            decode = self.with_special_tokens.decode
            return decode(token_ids[:-1]), decode(token_ids[-1:])
        return self.with_special_tokens.decode(token_ids), ""


class GrowingText:
    """The text of an answer while it arrives, in pieces that are never taken back."""

    def __init__(self, texts: AnswerTexts, asked: Asked) -> None:
        self._texts = texts
        self._asked = asked
        tokenizer = texts.decoder(asked)
        self._whole, self._trimmed = tokenizer.incremental(), tokenizer.incremental()
        self.chunks: list[Chunk] = []
        self.token_ids: list[int] = []
        self._sent = 0

    def take(self, chunk: Chunk) -> None:
        """Add the tokens of ``chunk``."""
        self.chunks.append(chunk)
        self.token_ids.extend(chunk.token_ids)

    @property
    def text(self) -> str:
        """The text so far, without a broken character at its end."""
        return self._decoded(self._whole, len(self.token_ids))

    def piece(self) -> str:
        """Return the text that is new since the last call and that the end of the answer can no longer trim."""
        new = self._settled()
        self._sent += len(new)
        return new

    def rest(self, whole: str) -> str:
        """Return the text behind the pieces, given the text of the whole answer."""
        return whole[self._sent :]

    def _settled(self) -> str:
        """Return the text behind what was sent that can be sent."""
        token_ids, asked = self.token_ids, self._asked
        if asked.keeps_stop:
            return self._decoded(self._whole, len(token_ids), self._sent)
        has_end = bool(token_ids) and self._texts.is_end(token_ids[-1], asked)
        text = self._decoded(self._trimmed, len(token_ids) - has_end, self._sent)
        for stop in asked.sampling.stop:  # it begins here: what may be its beginning is not sent
            text = text.partition(stop)[0]
        longest = max(map(len, asked.sampling.stop), default=1)
        return text[: max(0, len(text) - longest + 1)]

    def _decoded(self, text: IncrementalText, num_tokens: int, start: int = 0) -> str:
        """Return the text of the first tokens from the character ``start`` on, without a broken one at its end."""
        text.extend(self.token_ids[text.num_tokens : num_tokens])
        return text.text(start).rstrip(_BROKEN)
