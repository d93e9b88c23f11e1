"""Prompts of a user's data source, tokenised."""

from collections.abc import Callable, Mapping
from operator import index
from typing import Any

import orjson

from asyncrl.data.rows import tools_in
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.errors import DataError, HookFailed
from asyncrl.types import NewPrompt, Prompt


def tokeniser(
    tokenizer: TextTokenizer, max_tokens: int | None, variables: Mapping[str, Any], *, is_stored: bool
) -> Callable[[NewPrompt, int], Prompt | None]:
    """Return a function that makes the prompt of a row, or None if it has more than ``max_tokens``.

    ``variables`` are further variables of the chat template.  With ``is_stored``, label and metadata must be JSON
    values, because checkpoints store them.  The function raises HookFailed.
    """

    def tokenise(new: NewPrompt, row: int) -> Prompt | None:
        text = _text(new, tokenizer, variables)
        token_ids = _token_ids(new, row) or tuple(tokenizer.encode(text))
        if not token_ids:
            raise HookFailed(f"prompt {row} has no tokens")
        if is_stored:
            _check_json(new, row)
        prompt = Prompt(
            row=row,
            epoch=0,
            text=text,
            token_ids=token_ids,
            label=new.label,
            metadata=dict(new.metadata),
            messages=None if isinstance(new.prompt, str) else tuple(dict(message) for message in new.prompt),
            template_variables=dict(new.template_variables),
        )
        return None if max_tokens is not None and len(token_ids) > max_tokens else prompt

    return tokenise


def _text(new: NewPrompt, tokenizer: TextTokenizer, variables: Mapping[str, Any]) -> str:
    if isinstance(new.prompt, str):
        return new.prompt
    try:
        messages = [dict(message) for message in new.prompt]
        return tokenizer.render(messages, tools_in(new.metadata), {**variables, **new.template_variables})
    except (DataError, TypeError, ValueError) as error:
        raise HookFailed(f"a prompt must be text or a list of messages: {error}") from error


def _token_ids(new: NewPrompt, row: int) -> tuple[int, ...]:
    """Return the source's own token ids as Python's integers, which JSON has.  Raises HookFailed."""
    try:
        return () if new.token_ids is None else tuple(map(index, new.token_ids))
    except TypeError as error:
        raise HookFailed(f"prompt {row}: token_ids must be integers: {error}") from error


def _check_json(new: NewPrompt, row: int) -> None:
    try:
        orjson.dumps([new.label, dict(new.metadata), new.prompt, dict(new.template_variables)])
    except TypeError as error:
        raise HookFailed(f"prompt {row}: its values must be those of JSON, which --save stores: {error}") from error
