"""From chat messages to tokens: the template is rendered around placeholders, which recorded tokens replace.

A model's answer in the history is rendered as two placeholders, one for its thinking and one for the rest, so that the
template decides what stays, as it does for the real texts:

    the model wrote:      <think>I add.</think><tool_call>...</tool_call>                    (recorded tokens)
    content, rendered:    <think>⟦thinking 0⟧</think>⟦answer 0⟧
    thinking kept:        ...<|im_start|>assistant <think>⟦thinking 0⟧</think>⟦answer 0⟧<|im_end|>...
    thinking dropped:     ...<|im_start|>assistant ⟦answer 0⟧<|im_end|>...

Where the rendering continues the one of an earlier request by its whole answer, the tokens are the recorded ones and
those of the new text.  Elsewhere it is put together from recorded pieces and new text, and the line branches.
The template never sees the model's tool calls as objects: it would write their JSON with its own spacing.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.data.tokenizer import Message, TextTokenizer
from asyncrl.errors import DataError
from asyncrl.rollouts.gateway.chats import END_THINK, THINK, AnswerMemory, Recognised, RecordedAnswer, Rendering
from asyncrl.rollouts.gateway.contexts import Context, Encoder
from asyncrl.rollouts.gateway.refusals import RequestRefused, bad
from asyncrl.rollouts.record import TEMPLATE, TokenIds, ids_of, same_up_to
from asyncrl.types import Prompt

_NONCE = secrets.token_hex(4)
"""Part of every placeholder, so that no text of a client is taken for one."""
_PLACEHOLDER = re.compile(rf"\ue000{_NONCE}([ta])(\d+)\ue001")
_OPEN = re.compile(rf"\s*(?:{THINK}\s*)?")
_CLOSE = re.compile(rf"\s*{END_THINK}\s*")
_SPACE = re.compile(r"\s*")


def _placeholder(kind: str, call: int) -> str:
    return f"\ue000{_NONCE}{kind}{call}\ue001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A rendered request."""

    recognised: Recognised
    rendered: str
    """The rendering up to the start of the answer, with placeholders."""
    context: Context


@dataclass(slots=True)
class _Assembly:
    """The tokens that are put together so far, and the new text behind them."""

    token_ids: TokenIds
    text: str = ""
    kept: dict[int, int] = field(default_factory=dict)
    num_retokenized: int = 0


class ChatContexts:
    """Finds the tokens of the chats that an episode's client posts."""

    def __init__(self, encoder: Encoder, prompt: Prompt, memory: AnswerMemory) -> None:
        self._encoder = encoder
        self._prompt = prompt
        self._memory = memory

    async def chat(
        self, messages: list[Message], tools: Sequence[Any] | None, variables: Mapping[str, Any], suffix: str = ""
    ) -> Chat:
        """Render the messages, and ``suffix`` behind them, and find their tokens.  Raises RequestRefused."""
        recognised = self._memory.recognise(messages, {"tools": tools, "variables": variables})
        shown = [_with_placeholders(message, recognised.answers.get(place)) for place, message in enumerate(messages)]
        try:
            rendered = render(self._encoder.tokenizer, shown, tools, variables) + suffix
        except RequestRefused:
            if not recognised.answers:
                raise
            # Some templates (Mistral's) refuse an answer before a tool's result that has no tool calls as objects.
            rendered = render(self._encoder.tokenizer, messages, tools, variables) + suffix
            context = await self._plain_context(rendered, recognised, len(suffix))
        else:
            context = await self._context(rendered, recognised, len(suffix))
        return Chat(recognised=recognised, rendered=rendered, context=context)

    async def _plain_context(self, rendered: str, recognised: Recognised, suffix_len: int) -> Context:
        """Return the tokens of a rendering without placeholders.

        Answers are looked for by their text.  An answer that the template writes in another way is tokenised anew.
        """
        made, place = self._known(rendered, recognised, suffix_len)
        for _, answer in sorted(recognised.answers.items()):
            at = rendered.find(answer.raw, place) if answer.raw else -1
            if at >= 0:
                made.text += rendered[place:at]
                await self._flush(made)
                place = self._whole(rendered, at + len(answer.raw), answer, made)
            elif answer.rendered_len >= place:
                made.num_retokenized += answer.stop - answer.start
        made.text += rendered[place:]
        return await self._finished(made, recognised)

    async def _context(self, rendered: str, recognised: Recognised, suffix_len: int) -> Context:
        answers = {answer.call: answer for answer in recognised.answers.values()}
        made, place = self._known(rendered, recognised, suffix_len)
        while match := _PLACEHOLDER.search(rendered, place):
            made.text += rendered[place : match.start()]
            place = await self._take(rendered, match, answers[int(match[2])], made)
        made.text += rendered[place:]
        return await self._finished(made, recognised)

    async def _finished(self, made: "_Assembly", recognised: Recognised) -> Context:
        await self._flush(made)
        return Context(
            token_ids=made.token_ids,
            reason=TEMPLATE if recognised.is_unedited else None,
            kept=made.kept,
            num_retokenized=made.num_retokenized,
        )

    def _known(self, rendered: str, recognised: Recognised, suffix_len: int) -> "tuple[_Assembly, int]":
        """Return the recorded tokens with which the rendering begins, and the number of its characters they stand for.

        The last ``suffix_len`` characters are the text with which a client lets the model continue its answer.
        """
        same = {}
        for answer in self._memory.answers:
            if id(answer.rendering) not in same:
                same[id(answer.rendering)] = same_up_to(rendered, answer.rendering.text)
        if suffix_len and (continued := self._continued(rendered, same, len(rendered) - suffix_len)) is not None:
            return continued
        token_ids, place = self._longest_known(rendered, recognised, same)
        return _Assembly(ids_of(token_ids)[:]), place

    def _continued(self, rendered: str, same: Mapping[int, int], suffix_start: int) -> "tuple[_Assembly, int] | None":
        """Return the tokens of an answer that the client lets the model continue, as far as its text is still there.

        The answer may be the continuation of others, so that it begins within the suffix.  Returns None without one.
        """
        best, place = None, suffix_start
        for answer in self._memory.answers:
            if suffix_start <= answer.rendered_len <= same[id(answer.rendering)]:
                found = answer.rendered_len + same_up_to(rendered[answer.rendered_len :], answer.raw)
                if found > place:
                    best, place = answer, found
        if best is None:
            return None
        body_ids = tuple(best.line.ids[best.start : best.stop - bool(best.end)])
        num_tokens, length = self._encoder.tokens_before(body_ids, place - best.rendered_len)
        kept = best.rendered_len + length
        made = _Assembly(best.line.ids[: best.start + num_tokens], num_retokenized=int(kept < place))
        return made, kept

    def _longest_known(
        self, rendered: str, recognised: Recognised, same: Mapping[int, int]
    ) -> tuple[Sequence[int], int]:
        """Return the recorded tokens with which the rendering begins, and the number of its characters they stand for.

        The best is an answer that is still there as a whole, the next best the start of one.  ``same`` are the
        characters that the rendering has in common with each recorded one.
        """
        for answer in sorted(recognised.answers.values(), key=lambda each: each.rendered_len, reverse=True):
            if answer.rendered_len <= same[id(answer.rendering)]:
                stop = _whole_answer(rendered, answer)
                if stop is not None:
                    return answer.line.ids[: answer.stop], stop
        known = [each for each in self._memory.answers if each.rendered_len <= same[id(each.rendering)]]
        if known:
            best = max(known, key=lambda each: each.rendered_len)
            return best.line.ids[: best.start], best.rendered_len
        if self._prompt.text and rendered.startswith(self._prompt.text):
            return self._prompt.token_ids, len(self._prompt.text)
        return (), 0

    async def _take(self, rendered: str, match: re.Match[str], answer: RecordedAnswer, made: _Assembly) -> int:
        """Add the tokens for a placeholder, and return the place behind it and what belongs to it."""
        body_ids = tuple(answer.line.ids[answer.start : answer.stop - bool(answer.end)])
        place, text = match.end(), answer.raw
        if match[1] == "t":
            whole = re.compile(_CLOSE.pattern + re.escape(_placeholder("a", answer.call))).match(rendered, place)
            if whole is None:  # the thinking without the rest of the answer: no template is known to do so
                made.text += _thinking(answer.raw)
                return place
            place = whole.end()
            made.text = _without_opening(made.text, answer.raw)
        elif END_THINK in text:
            text = _behind_thinking(text)
        else:
            made.text = made.text[: len(made.text) - _common_space(made.text, text)]
        await self._flush(made)
        body_ids = await self._tail(body_ids, answer.raw, text, made)
        made.token_ids.extend(body_ids)
        made.kept[answer.call] = len(body_ids)
        return self._end(rendered, place, answer, made)

    def _whole(self, rendered: str, place: int, answer: RecordedAnswer, made: "_Assembly") -> int:
        """Add all tokens of an answer whose text ends at ``place``, and return the place behind its end token."""
        body_ids = answer.line.ids[answer.start : answer.stop - bool(answer.end)]
        made.token_ids.extend(body_ids)
        made.kept[answer.call] = len(body_ids)
        return self._end(rendered, place, answer, made)

    def _end(self, rendered: str, place: int, answer: RecordedAnswer, made: "_Assembly") -> int:
        """Add the end token of an answer if the rendering has it there, and return the place behind it."""
        behind = _behind_end(rendered, place, answer)
        if behind is None:
            return place
        made.token_ids.append(answer.line.ids[answer.stop - 1])
        made.kept[answer.call] += 1
        return behind

    async def _tail(self, body_ids: tuple[int, ...], raw: str, text: str, made: _Assembly) -> tuple[int, ...]:
        """Return the recorded tokens of ``text``, the end of ``raw``; a token that the cut goes through is split."""
        cut = len(raw) - len(text)
        if cut == 0:
            return body_ids
        num_before, length = self._encoder.tokens_before(body_ids, cut)
        if length == cut:
            return body_ids[num_before:]
        behind = self._encoder.tokenizer.decode(body_ids[num_before + 1 :])
        made.text = text[: max(0, len(text) - len(behind))]
        made.num_retokenized += 1
        await self._flush(made)
        return body_ids[num_before + 1 :]

    async def _flush(self, made: _Assembly) -> None:
        made.token_ids.extend(await self._encoder.encode(made.text))
        made.text = ""


def render(
    tokenizer: TextTokenizer, messages: Sequence[Message], tools: Sequence[Any] | None, variables: Mapping[str, Any]
) -> str:
    """Render the messages.  Raises RequestRefused if the template refuses them."""
    try:
        return tokenizer.render(messages, tools, variables)
    except DataError as error:
        raise bad(str(error)) from error


def remember(memory: AnswerMemory, chat: Chat) -> Rendering:
    """Return the text in which the rendering of this chat is stored: a shorter one that it continues, made longer."""
    for answer in reversed(memory.answers):
        if chat.rendered.startswith(answer.rendering.text):
            answer.rendering.text = chat.rendered
            return answer.rendering
    return Rendering(chat.rendered)


def _with_placeholders(message: Message, answer: RecordedAnswer | None) -> Message:
    if answer is None:
        return message
    content = _placeholder("a", answer.call)
    if END_THINK in answer.raw:
        content = f"{THINK}\n{_placeholder('t', answer.call)}\n{END_THINK}\n\n{content}"
    return {"role": "assistant", "content": content}


def _whole_answer(rendered: str, answer: RecordedAnswer) -> int | None:
    """Return the place behind the answer if the rendering has all of it at its recorded place."""
    place = answer.rendered_len
    if answer.raw and rendered.startswith(answer.raw, place):  # rendered without placeholders
        place += len(answer.raw)
        behind = _behind_end(rendered, place, answer)
        return place if behind is None else behind
    if END_THINK in answer.raw:
        thinking = _placeholder("t", answer.call)
        place = _OPEN.match(rendered, place).end()  # type: ignore[union-attr]  # matches the empty text
        close = _CLOSE.match(rendered, place + len(thinking)) if rendered.startswith(thinking, place) else None
        if close is None:
            return None
        place = close.end()
    else:
        place = _SPACE.match(rendered, place).end()  # type: ignore[union-attr]
    content = _placeholder("a", answer.call)
    if not rendered.startswith(content, place):
        return None
    place += len(content)
    behind = _behind_end(rendered, place, answer)
    return place if behind is None else behind


def _behind_end(rendered: str, place: int, answer: RecordedAnswer) -> int | None:
    """Return the place behind the answer's end token; None if the answer has none or the rendering another."""
    at = _SPACE.match(rendered, place).end()  # type: ignore[union-attr]
    return at + len(answer.end) if answer.end and rendered.startswith(answer.end, at) else None


def _behind_thinking(raw: str) -> str:
    """Return the text behind the last thinking, without the line ends that templates strip."""
    return raw.rpartition(END_THINK)[2].lstrip("\n")


def _thinking(raw: str) -> str:
    return raw.partition(END_THINK)[0].removeprefix(THINK).strip("\n")


def _without_opening(text: str, raw: str) -> str:
    """Return the new text without the mark of thinking at its end, if the answer itself begins with it."""
    if raw.lstrip().startswith(THINK) and text.rstrip().endswith(THINK):
        text = text.rstrip().removesuffix(THINK)
        return text[: len(text) - _common_space(text, raw)]
    return text


def _common_space(text: str, raw: str) -> int:
    """Return the length of the white space that ends ``text`` and begins ``raw``."""
    space = raw[: len(raw) - len(raw.lstrip())]
    return next((size for size in range(len(space), 0, -1) if text.endswith(space[:size])), 0)
