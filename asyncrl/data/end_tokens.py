"""The tokens that end an answer, as the checkpoint names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import ConfigError


def end_tokens(checkpoint: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids in generation_config.json, else those in ``config``, the parsed config.json.

    Empty if neither names any.  Raises ConfigError.
    """
    found = _eos(checkpoint / "generation_config.json")
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _eos(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        found = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return found.get("eos_token_id")
