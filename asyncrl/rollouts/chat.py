"""Chat messages as tokens: a new conversation, or the continuation of tokens that the model wrote.

A continuation is rendered behind a placeholder, so that nothing that was recorded is rendered or tokenised again:

    template:    user "?"  assistant MARK│ <end of turn> user "result" <start of the answer>
    recorded:    ... model's tokens <end of turn>
    appended:                                            user "result" <start of the answer>
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

MARK = "ASYNCRLPLACEHOLDER"
"""The content of the placeholder: letters alone, because templates strip and escape other characters."""
_LONGEST_END = 8
"""Tokens of an end of turn that the model may have written, at most; templates have 1 to 3."""


class ChatTokenizer(Protocol):
    """The tokenizer of a checkpoint with its chat template."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without added special tokens."""

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of ``token_ids``."""

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None, variables: Mapping[str, Any] = ...
    ) -> str:
        """Render a chat up to the start of the answer.  Raises DataError if the template refuses it."""


def conversation_ids(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Return the tokens of a new conversation, up to the start of the answer.  Raises DataError."""
    return tokenizer.encode(tokenizer.render([dict(each) for each in messages], tools, variables))


def continuation_ids(
    tokenizer: ChatTokenizer,
    written: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Return the tokens of ``messages`` behind ``written``, which ends with a turn of the model.

    They begin with the rest of the turn's end: models write its first token or none.  Raises DataError, and ValueError
    if the template does not show the turn before.
    """
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    text = tokenizer.render([*before, *(dict(each) for each in messages)], tools, variables)
    _, mark, after = text.rpartition(MARK)
    if not mark:
        raise ValueError("the chat template leaves out the answer before these messages; observe text or token ids")
    token_ids = tokenizer.encode(after)
    return token_ids[_num_shared(written, token_ids) :]


def _num_shared(written: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return the number of first tokens of ``token_ids`` with which ``written`` ends."""
    longest = min(len(written), len(token_ids), _LONGEST_END)
    return next((n for n in range(longest, 0, -1) if list(written[-n:]) == list(token_ids[:n])), 0)
