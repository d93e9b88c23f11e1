"""Loss masks of chats: the tokens of a rendered chat that are answers of the assistant.

The template itself tells where an answer is.  The chat is rendered once more with another text as the content of one
message: before the first and after the last difference both renderings are equal, so the difference is the place of
that message's content.  An answer begins behind the part of the generation prompt that the chat has in front of the
content, and ends with what the template writes behind an answer, such as tool calls and an end token.  This needs no
table of models, and holds for templates that drop earlier thinking.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from asyncrl.data.tokenizer import Message, TextTokenizer
from asyncrl.errors import DataError

SENTINEL = "\ue0f0"
"""The content that replaces another: a character of Unicode's private use area, which no chat has."""
PROBE: Message = {"role": "user", "content": "-"}
"""A message in front of others that are rendered by themselves, because templates want a user's message first."""
_MAY_MOVE = ("system", "developer")
"""Roles of messages that a template may show elsewhere than behind the message before."""

Span = tuple[int, int]
Masked = tuple[list[int], list[int]]
"""Token ids, and a 0 or 1 for each."""


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template."""

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompts: bool) -> str:
        """Render a chat; with ``prompts`` up to the start of the next answer."""

    def encoded(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the tokens of a text, without added special tokens, and the characters of each."""


def loss_mask(tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Masked:
    """Return the tokens of a whole chat, as the template renders it, and its mask: 1 at answers of the assistant.

    An answer with ``loss_mask`` or ``step_loss_mask`` other than 1 is masked.  Raises DataError if the template refuses
    the chat, or does not show an answer.
    """
    chat = _Chat(tokenizer, list(messages), tools)
    return _masked(tokenizer, chat.text, [chat.answer(place) for place in _answers(messages)])


def loss_mask_by_message(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> Masked:
    """Return the tokens of a chat whose messages are rendered one by one, and its mask: 1 at answers of the assistant.

    Every answer is rendered as the last message, so templates that drop earlier thinking keep it, as in an episode
    whose tokens are never rendered again.  Neighbouring messages with the role ``tool`` are rendered together.  Raises
    DataError.
    """
    base = tokenizer.rendered([PROBE], None, prompts=False)
    header = tokenizer.rendered([PROBE], None, prompts=True).removeprefix(base)
    text, spans = "", list[Span]()
    for group in _together(messages):
        if not text:
            behind = tokenizer.rendered([PROBE, PROBE], None, prompts=False).removeprefix(base)
            piece = tokenizer.rendered([*group, PROBE], tools, prompts=False).removesuffix(behind)
        else:
            piece = _rest(base, tokenizer.rendered([PROBE, *group], None, prompts=False), group)
        if _is_trained(group[0]):
            spans.append((len(text) + _shared(piece, header), len(text) + len(piece)))
        text += piece
    return _masked(tokenizer, text, spans)


class _Chat:
    """One rendered chat, and the places of its answers."""

    def __init__(self, tokenizer: ChatTokenizer, messages: list[Message], tools: Sequence[Any] | None) -> None:
        self._tokenizer, self._messages, self._tools = tokenizer, messages, tools
        self.text = tokenizer.rendered(messages, tools, prompts=False)
        base = tokenizer.rendered([PROBE], None, prompts=False)
        header = tokenizer.rendered([PROBE], None, prompts=True).removeprefix(base)
        _, spans = tokenizer.encoded(header)
        self._headers = [header[:end] for end in sorted({end for _, end in spans if end}, reverse=True)]
        """The generation prompt and its beginnings that end with a token, the longest first."""

    def answer(self, place: int) -> Span:
        """Return the characters of the answer in message ``place``.  Raises DataError if the template hides it."""
        message = self._messages[place]
        shown = {**message, "content": SENTINEL}
        content = self._difference(place, shown)
        if content is None:  # some templates show tool calls instead of the content
            shown = {"role": message["role"], "content": SENTINEL}
            content = self._difference(place, shown)
        if content is None:
            raise DataError(f"the chat template does not show message {place}")
        start, stop = content
        front = self.text[self._end_before(place) : start]
        header = next((header for header in self._headers if header in front), None)
        if header is not None:
            start += front.index(header) + len(header) - len(front)
        alone = self._tokenizer.rendered([PROBE, shown], None, prompts=False)
        behind = alone.partition(SENTINEL)[2]
        return start, max(start, stop + _shared(self.text[stop:], behind))

    def _end_before(self, place: int) -> int:
        """Return the end of the content in front of message ``place``.

        Some templates move system messages to the front of the chat.  The message before them is looked at as well.
        """
        end = 0
        for earlier in range(place - 1, -1, -1):
            message = self._messages[earlier]
            found = self._difference(earlier, {**message, "content": SENTINEL})
            end = max(end, found[1] if found else 0)
            if message.get("role") not in _MAY_MOVE:
                break
        return end

    def _difference(self, place: int, other: Message) -> Span | None:
        """Return the characters that differ if ``other`` replaces a message; None if there are none.

        The end is before the start if what is around the content begins and ends alike, such as ``assistant`` with a
        line end and a line end with ``<tool_call>``.
        """
        messages = [*self._messages[:place], other, *self._messages[place + 1 :]]
        text = self._tokenizer.rendered(messages, self._tools, prompts=False)
        if SENTINEL not in text:
            return None
        behind = _shared(self.text[::-1], text[::-1])
        return _shared(self.text, text), len(self.text) - behind


def _answers(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if _is_trained(message)]


def _is_trained(message: Message) -> bool:
    keys = ("loss_mask", "step_loss_mask")
    return message.get("role") == "assistant" and all(message.get(key, 1) == 1 for key in keys)


def _together(messages: Sequence[Message]) -> list[list[Message]]:
    """Put neighbouring messages of tools into one list; every other message is alone."""
    found: list[list[Message]] = []
    for message in messages:
        if found and message.get("role") == found[-1][-1].get("role") == "tool":
            found[-1].append(message)
        else:
            found.append([message])
    return found


def _rest(base: str, text: str, messages: Sequence[Message]) -> str:
    """Return what a chat has behind the rendering of its first message."""
    if not text.startswith(base):
        what = f"a message of role {messages[0].get('role')!r} elsewhere than behind the message before"
        raise DataError(
            f"the chat template shows {what}; use the loss mask of the whole chat: type qwen3_5 or template"
        )
    return text[len(base) :]


def _shared(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin, by bisection: chats are long."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _masked(tokenizer: ChatTokenizer, text: str, spans: Sequence[Span]) -> Masked:
    """Return the tokens of a text, with 1 at tokens that have a character in one of the spans."""
    token_ids, places = tokenizer.encoded(text)
    marks = bytearray(len(text))
    for start, stop in spans:
        marks[start:stop] = b"\x01" * (stop - start)
    return token_ids, [int(any(marks[start:stop])) for start, stop in places]


@dataclass(frozen=True, slots=True)
class _Ours:
    """The project's tokenizer as a ``ChatTokenizer``."""

    tokenizer: TextTokenizer

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompts: bool) -> str:
        return self.tokenizer.render(messages, tools, add_generation_prompt=prompts)

    def encoded(self, text: str) -> tuple[list[int], list[Span]]:
        return self.tokenizer.encode_with_offsets(text)


@dataclass(frozen=True, slots=True)
class _Transformers:
    """A tokenizer of transformers as a ``ChatTokenizer``; it must be a fast one, which knows offsets."""

    tokenizer: Any

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompts: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompts
        )
        return text

    def encoded(self, text: str) -> tuple[list[int], list[Span]]:
        found: Mapping[str, Any] = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), [(start, stop) for start, stop in found["offset_mapping"]]


def chat_tokenizer(tokenizer: Any) -> ChatTokenizer:
    """Return a ``ChatTokenizer`` for the project's tokenizer, or for one of transformers."""
    return _Ours(tokenizer) if isinstance(tokenizer, TextTokenizer) else _Transformers(tokenizer)


_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen", "template")


class MultiTurnLossMaskGenerator:
    """slime's class of this name: the tokens and the loss mask of a chat.

    ``qwen`` and ``qwen3`` render messages one by one, ``qwen3_5`` and ``template`` the whole chat, with any template.
    ``distill_qwen`` has one question and one answer.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        """``tokenizer`` is the project's or one of transformers.  Raises ValueError for an unknown type."""
        if tokenizer_type not in _TYPES:
            raise ValueError(f"tokenizer_type must be one of {', '.join(_TYPES)}, got {tokenizer_type!r}")
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type
        self._chat = chat_tokenizer(tokenizer)

    def get_loss_mask(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Masked:
        """Return token ids, and a mask with 1 at the answers of the assistant.  Raises DataError."""
        if self.tokenizer_type in ("qwen3_5", "template"):
            return loss_mask(self._chat, messages, tools)
        if self.tokenizer_type == "distill_qwen" or (self.tokenizer_type == "qwen" and self._is_distilled()):
            return self._one_answer(messages, tools)
        return loss_mask_by_message(self._chat, messages, tools)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Return for each mask the number of tokens from its first 1 on."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Return the texts of neighbouring tokens with mask 1."""
        pairs = groupby(zip(token_ids, loss_masks, strict=True), lambda pair: pair[1])
        return [self.tokenizer.decode(tuple(token for token, _ in group)) for mask, group in pairs if mask == 1]

    def _is_distilled(self) -> bool:
        """Whether the generation prompt is that of DeepSeek's models."""
        return "<｜Assistant｜>" in self._chat.rendered([PROBE], None, prompts=True)  # noqa: RUF001

    def _one_answer(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Masked:
        prompt, _ = self._chat.encoded(self._chat.rendered(messages[:1], tools, prompts=True))
        answer, _ = self._chat.encoded(messages[-1]["content"])
        mark = int(_is_trained({**messages[-1], "role": "assistant"}))
        return prompt + answer, [0] * len(prompt) + [mark] * len(answer)
