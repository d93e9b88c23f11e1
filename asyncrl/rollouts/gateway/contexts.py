"""The tokens of a request: recorded tokens for what the record holds, new tokens for the rest of its text.

A text matches a recorded line up to some character.  The text of a line is what its client sent, because some
tokenizers normalise: decoding returns another text then.  Recorded tokens before that character are used as they are.
Where the character lies inside a token that the model wrote, the part of that token before it is tokenised anew: this
is counted in ``episodes/retokenized_tokens`` and logged once per gateway.
"""

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.daemon_threads import DaemonThreads
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.rollouts.record import NOTHING_KEPT, Line, TokenIds, TokenRecord, ids_of, same_up_to
from asyncrl.types import Prompt

logger = logging.getLogger(__name__)

_LONG = 16_000
"""Characters from which a text is tokenised in a thread: about 8 ms, and the library releases the GIL."""
_THREADS = 4
"""Threads for long texts."""
_REMEMBERED = 512
"""Texts whose tokens are remembered: the system prompts and questions that the episodes of a group share."""

_NONE = ids_of(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The tokens of a request, and what became of recorded ones."""

    token_ids: TokenIds
    reason: str | None = None
    """The reason why the tokens do not extend a line, where the messages tell it."""
    kept: Mapping[int, int] = field(default_factory=lambda: NOTHING_KEPT)
    """Tokens of each turn, by call, that the context holds behind the place where it departs from a line."""
    num_retokenized: int = 0
    """Tokens of the model of which a part was tokenised anew."""


class Encoder:
    """Tokenises texts: long ones in a thread, repeated ones once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer.skipping(False)
        self._remembered = functools.lru_cache(_REMEMBERED)(lambda text: ids_of(tokenizer.encode(text)))
        self._has_warned = False
        self._threads = DaemonThreads(_THREADS, "tokenizer")

    async def encode(self, text: str) -> TokenIds:
        """Return the tokens of ``text``, which the caller must not change."""
        if not text:
            return _NONE
        if len(text) > _LONG:
            encoding = asyncio.get_running_loop().run_in_executor(self._threads, self.tokenizer.encode, text)
            return ids_of(await encoding)
        return self._remembered(text)

    def warn_of_cut(self, name: str) -> None:
        """Log, once, that a part of a token that the model wrote was tokenised anew."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: a client's text ends inside a token of the model, a part of which is tokenised anew; further "
                "ones are counted in episodes/retokenized_tokens",
                name,
            )

    def tokens_before(self, token_ids: tuple[int, ...], num_characters: int) -> tuple[int, int]:
        """Return the number of first tokens within ``num_characters`` of their text, and the characters of these."""
        decode = self.tokenizer.decode
        low, high, length = 0, len(token_ids), 0
        while low < high:
            middle = (low + high + 1) // 2
            size = len(decode(token_ids[:middle]))
            if size <= num_characters:
                low, length = middle, size
            else:
                high = middle - 1
        return low, length


@dataclass(frozen=True, slots=True)
class _Sent:
    """Text that a client sent, and its tokens."""

    start: int
    """Position of its first token in the context."""
    ids: TokenIds
    text: str


@dataclass(slots=True)
class _LineText:
    """The text of a line, by pieces: the prompt, each observation and each turn."""

    text: str = ""
    pieces: list[tuple[int, int, bool]] = field(default_factory=list)
    """First token, first character, and whether the model wrote the piece."""
    num_tokens: int = 0


class TextContexts:
    """Finds the tokens of the texts that an episode's client posts."""

    def __init__(self, encoder: Encoder, prompt: Prompt, record: TokenRecord) -> None:
        self._encoder = encoder
        self._prompt = prompt
        self._record = record
        self._texts: dict[int, _LineText] = {}
        self._sent: dict[int, list[_Sent]] = {}
        """Texts of clients, by the position behind their last token."""

    async def context(self, text: str) -> Context:
        """Return the tokens of ``text``: the longest recorded prefix, and the tokens of the rest."""
        best, num_same = None, 0
        for line in self._record.lines:
            found = same_up_to(text, self._text_of(line).text)
            if found > num_same:
                best, num_same = line, found
        if best is not None:
            known = self._text_of(best)
            if num_same == len(known.text):
                known_ids = best.ids[:]  # a copy: another request may extend the line during the wait
                return Context(token_ids=await self._extended(known_ids, text[num_same:]))
            if num_same >= known.pieces[1][1]:  # all of the prompt, or its turn is empty
                return await self._cut(best, known, text, num_same)
        if self._prompt.text and text.startswith(self._prompt.text):
            rest = text[len(self._prompt.text) :]
            return Context(token_ids=await self._extended(ids_of(self._prompt.token_ids), rest))
        return Context(token_ids=await self._extended(_NONE, text))

    def longest_match(self, text: str) -> int:
        """Return the length of the longest recorded text, or of the prompt, that ``text`` extends; 0 if none."""
        known = [self._text_of(line).text for line in self._record.lines]
        known = known or [self._prompt.text]
        return max((len(each) for each in known if text.startswith(each)), default=0)

    async def _cut(self, line: Line, known: _LineText, text: str, num_same: int) -> Context:
        """Return the tokens of a text that departs from the line behind its first ``num_same`` characters."""
        number = max(place for place, (_, began, _) in enumerate(known.pieces) if began <= num_same)
        first, began, is_turn = known.pieces[number]
        if not is_turn:
            return Context(token_ids=await self._extended(line.ids[:first], text[began:]))
        last = known.pieces[number + 1][0] if number + 1 < len(known.pieces) else line.num_tokens
        num_tokens, length = self._encoder.tokens_before(tuple(line.ids[first:last]), num_same - began)
        return Context(
            token_ids=await self._extended(line.ids[: first + num_tokens], text[began + length :]),
            num_retokenized=int(began + length < num_same),
        )

    async def _extended(self, known: TokenIds, text: str) -> TokenIds:
        """Return known tokens and those of the text behind them, and note whose text these are."""
        ids = await self._encoder.encode(text)
        whole = known + ids
        self._sent.setdefault(len(whole), []).append(_Sent(len(known), ids, text))
        return whole

    def _text_before(self, line: Line, start: int, stop: int) -> str:
        """Return the text of a prompt or an observation: as its client sent it, or decoded."""
        decode = self._encoder.tokenizer.decode
        for sent in reversed(self._sent.get(stop, ())):
            if sent.start >= start and line.ids[sent.start : stop] == sent.ids:
                first = line.ids[start : sent.start]
                is_prompt = start == 0 and first == ids_of(self._prompt.token_ids) and self._prompt.text
                return (self._prompt.text if is_prompt else decode(tuple(first))) + sent.text
        return decode(tuple(line.ids[start:stop]))

    def _text_of(self, line: Line) -> _LineText:
        """Return the line's text, extended by what was appended since the last call."""
        known = self._texts.setdefault(id(line), _LineText())
        if known.num_tokens == line.num_tokens:
            return known
        edges = [(0, False)]
        for start, turn in line.turns:
            start += line.prompt_len
            edges += [(start, True), (start + len(turn.token_ids), False)]
        edges = [edge for edge in edges if edge[0] >= known.num_tokens]
        stops = [*(start for start, _ in edges[1:]), line.num_tokens]
        for (start, is_turn), stop in zip(edges, stops, strict=True):
            if start < stop or is_turn:
                known.pieces.append((start, len(known.text), is_turn))
                decode = self._encoder.tokenizer.decode
                known.text += decode(tuple(line.ids[start:stop])) if is_turn else self._text_before(line, start, stop)
        known.num_tokens = line.num_tokens
        return known
