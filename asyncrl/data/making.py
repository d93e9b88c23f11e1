"""Prompts from rows: chat template, tokens, length limit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.areas import DataConfig
from asyncrl.data.raw_rows import RawRow
from asyncrl.data.rows import TRAINING_KEYS, Row, row_of
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.errors import DataError
from asyncrl.types import JsonValue, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The prompt of a row, without its identity in the run."""

    place: int
    text: str
    token_ids: tuple[int, ...]
    label: JsonValue
    metadata: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...] | None
    template_variables: Mapping[str, Any]

    def prompt(self, row: int, epoch: int) -> Prompt:
        """Return the prompt as ``row`` of ``epoch``."""
        return Prompt(
            row=row,
            epoch=epoch,
            text=self.text,
            token_ids=self.token_ids,
            label=self.label,
            metadata=self.metadata,
            messages=self.messages,
            template_variables=self.template_variables,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """A row whose prompt exceeds ``--rollout-max-prompt-len``."""

    place: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A row that has no prompt, and the reason."""

    place: int
    line: int | None
    fault: str


class PromptMaker:
    """Makes prompts from rows as the settings say."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: TextTokenizer,
        *,
        takes_numbers: bool = False,
        key_settings: str = TRAINING_KEYS,
    ) -> None:
        """``takes_numbers`` and ``key_settings``: see ``row_of``."""
        self._data = data
        self._key_settings = key_settings
        self._takes_numbers = takes_numbers
        self._tokenizer = tokenizer
        self._variables = data.template_variables

    def made(self, rows: Sequence[RawRow], *, is_limited: bool = True) -> Iterator[Made | TooLong | Broken]:
        """Yield the outcome of each row, in order.  ``is_limited`` applies ``--rollout-max-prompt-len``."""
        good = [self._checked(row) for row in rows]
        texts = [found[1] for found in good if isinstance(found, tuple)]
        tokens = iter(self._tokenizer.encode_all(texts))
        limit = self._data.rollout_max_prompt_len if is_limited else None
        for raw, found in zip(rows, good, strict=True):
            if isinstance(found, str):
                yield Broken(place=raw.place, line=raw.line, fault=found)
                continue
            (row, text), token_ids = found, next(tokens)
            if not token_ids:
                fault = f'key "{self._data.input_key}" has no tokens'
                yield Broken(place=raw.place, line=raw.line, fault=fault)
            elif limit is not None and len(token_ids) > limit:
                yield TooLong(place=raw.place, num_tokens=len(token_ids))
            else:
                yield self._finished(raw.place, row, text, token_ids)

    def _checked(self, raw: RawRow) -> tuple[Row, str] | str:
        """Return the row and the text of its prompt, or the fault."""
        if raw.fault is not None:
            return raw.fault
        try:
            row = row_of(
                raw.found,
                self._data,
                takes_numbers=self._takes_numbers,
                settings=self._key_settings,
                has_all_keys=raw.has_all_keys,
            )
            return row, self._text(row)
        except DataError as error:
            return str(error)

    def _text(self, row: Row) -> str:
        if isinstance(row.prompt, str):
            return row.prompt
        if not self._tokenizer.has_chat_template and not self._data.apply_chat_template:
            raise DataError(
                f'key "{self._data.input_key}" is a list of messages, and the checkpoint has no chat template; '
                "give text, or a checkpoint with a chat template"
            )
        return self._tokenizer.render(row.prompt, row.tools, self._variables)

    def _finished(self, place: int, row: Row, text: str, token_ids: list[int]) -> Made:
        has_messages = isinstance(row.prompt, list) and not self._data.apply_chat_template
        return Made(
            place=place,
            text=text,
            token_ids=tuple(token_ids),
            label=row.label,
            metadata=row.metadata,
            messages=tuple(row.prompt) if has_messages and isinstance(row.prompt, list) else None,
            # Those of training are the run's, which every turn has anyway; a held-out set may have others.
            template_variables={} if self._key_settings == TRAINING_KEYS else self._variables,
        )
