"""Rows of a JSONL file.  Every error names file and line."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from asyncrl.config.areas import DataConfig
from asyncrl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One JSON object of the file."""

    line: int
    """Line number from 1, blank lines included."""
    prompt: str | list[dict[str, Any]]
    """Text, or chat messages if a chat template is applied."""
    label: str | None
    metadata: dict[str, Any]


def read_rows(path: Path, data: DataConfig) -> list[Row]:
    """Read every row of the file; blank lines are skipped.  Raises DataError."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    rows = list(_rows(path, lines, data))
    if not rows:
        raise DataError(f"{path}: the file has no rows")
    return rows


def _rows(path: Path, lines: list[bytes], data: DataConfig) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _row(number, _object(line), data)
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from None


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg}, column {error.colno}") from None
    if not isinstance(found, dict):
        raise DataError(f"must be a JSON object, got {_kind(found)}; the file needs one object per line")
    return found


def _row(number: int, found: dict[str, Any], data: DataConfig) -> Row:
    prompt = _at(found, data.input_key, "input-key")
    _check_prompt(prompt, data)
    metadata = {} if data.metadata_key is None else _at(found, data.metadata_key, "metadata-key")
    if not isinstance(metadata, dict):
        raise DataError(f'key "{data.metadata_key}" must be an object, got {_kind(metadata)}')
    if isinstance(prompt, str) and data.apply_chat_template:
        prompt = [{"role": "user", "content": prompt}]
    return Row(line=number, prompt=prompt, label=_label(found, data.label_key), metadata=metadata)


def _label(found: dict[str, Any], key: str | None) -> str | None:
    if key is None:
        return None
    label = _at(found, key, "label-key")
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(f'key "{key}" must be text or a number, got {_kind(label)}')
    return str(label)


def _at(found: dict[str, Any], key: str, flag: str) -> Any:
    if key in found:
        return found[key]
    guess = difflib.get_close_matches(key, found, n=1)
    hint = f"did you mean --{flag} {guess[0]}?" if guess else f"--{flag} names the key"
    raise DataError(f'key "{key}" is missing; the row has: {", ".join(found) or "nothing"}; {hint}')


def _check_prompt(prompt: Any, data: DataConfig) -> None:
    where = f'key "{data.input_key}"'
    if isinstance(prompt, list) and not data.apply_chat_template:
        raise DataError(f"{where} must be text, got a list; chat messages need --apply-chat-template")
    if not isinstance(prompt, str | list):
        wanted = "text or a list of messages" if data.apply_chat_template else "text"
        raise DataError(f"{where} must be {wanted}, got {_kind(prompt)}")
    if not prompt:
        raise DataError(f"{where} is empty")
    if isinstance(prompt, list):
        for place, message in enumerate(prompt):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise DataError(f"{where}, message {place} must be an object with role and content")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]
