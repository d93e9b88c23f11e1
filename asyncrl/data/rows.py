"""The keys of a row: prompt, label, metadata and tools.  Errors name the key."""

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.config.areas import DataConfig
from asyncrl.data import json_text
from asyncrl.data.json_text import kind
from asyncrl.errors import DataError
from asyncrl.types import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row whose keys have the right types."""

    prompt: str | list[dict[str, Any]]
    """Text, or chat messages."""
    label: JsonValue
    metadata: dict[str, Any]
    """The metadata, with the tools under "tools" if the row has any."""
    tools: list[Any] | None


TRAINING_KEYS = "--{}-key"
"""The flags for the keys of a row of training; input and label take the place of the braces."""
HELD_OUT_KEYS = "--eval-{}-key"
"""The flags for the keys of a row of held-out prompts."""
FILE_KEYS = "{}_key"
"""The settings for the keys of a row of held-out prompts, in the file of ``--eval-config``."""


def row_of(
    found: Mapping[str, Any],
    data: DataConfig,
    *,
    takes_numbers: bool = False,
    settings: str = TRAINING_KEYS,
    has_all_keys: bool = False,
) -> Row:
    """Check the keys of a row.  Raises DataError with one line that names the key.

    ``takes_numbers``: a prompt may be an integer, such as the number of a task, and becomes its text.  ``settings``
    are the names of the settings that choose the keys, for error lines: one of the constants above.  With
    ``has_all_keys``, nulls are taken out of messages and tools: see ``RawRow``.
    """
    prompt = _at(found, data.input_key, settings.format("input"))
    if takes_numbers and isinstance(prompt, int) and not isinstance(prompt, bool):
        prompt = str(prompt)
    _check_prompt(prompt, data.input_key)
    if has_all_keys and isinstance(prompt, list):
        prompt = [_without_nulls(message, but="content") for message in prompt]
    if isinstance(prompt, str) and data.apply_chat_template:
        prompt = [{"role": "user", "content": prompt}]
    label = None if data.label_key is None else _at(found, data.label_key, settings.format("label"))
    metadata = dict(_parsed(found, data.metadata_key, dict) or {})
    tools = _parsed(found, data.tool_key, list)
    if tools is not None:
        tools = [_tool(tool, place, data.tool_key) for place, tool in enumerate(tools)]
        metadata["tools"] = tools = _without_nulls(tools) if has_all_keys else tools
    return Row(prompt=prompt, label=label, metadata=metadata, tools=tools)


def tools_in(metadata: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools in a prompt's metadata, as ``row_of`` puts them there; None without a list of them."""
    tools = metadata.get("tools")
    return tools if isinstance(tools, list) else None


def _tool(tool: Any, place: int, key: str | None) -> dict[str, Any]:
    """Return the schema of a tool, parsed if it is text."""
    parsed = tool
    if isinstance(tool, str):
        with suppress(DataError):
            parsed = json_text.loads(tool)
    if not isinstance(parsed, dict):
        raise DataError(f'key "{key}", tool {place} must be an object or its JSON text, got {kind(parsed)}')
    return parsed


def _without_nulls(value: Any, but: str | None = None) -> Any:
    """Return the value with objects that lack their keys with null, at any depth; ``but`` stays in the outermost."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None or key == but}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _at(found: Mapping[str, Any], key: str, setting: str) -> Any:
    if key in found:
        return found[key]
    guess = difflib.get_close_matches(key, found, n=1)
    hint = f"did you mean {setting} {guess[0]}?" if guess else f"{setting} names the key"
    raise DataError(f'key "{key}" is missing; the row has: {_shortened(", ".join(found)) or "nothing"}; {hint}')


def _parsed(found: Mapping[str, Any], key: str | None, wanted: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """Return the object or list under ``key``, parsed if it is text; None if the row has none, or an empty value."""
    if key is None or not (value := found.get(key)):
        return value if wanted is list and value == [] else None
    try:
        parsed = json_text.loads(value) if isinstance(value, str) else value
    except DataError as error:
        raise DataError(f'key "{key}": its text is {error}') from None
    if not isinstance(parsed, wanted):
        text = " in its text" if isinstance(value, str) else ""
        raise DataError(f'key "{key}" must be {kind(wanted())}, got {kind(parsed)}{text}')
    return parsed


def _check_prompt(prompt: Any, key: str) -> None:
    where = f'key "{key}"'
    if not isinstance(prompt, str | list):
        raise DataError(f"{where} must be text or a list of messages, got {kind(prompt)}")
    if not prompt:
        raise DataError(f"{where} is empty")
    if isinstance(prompt, list):
        for place, message in enumerate(prompt):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise DataError(f"{where}, message {place} must be an object with role and content")


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
