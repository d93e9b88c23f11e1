"""The tokens that end an answer, as the checkpoint names them."""

from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import ConfigError


def end_tokens(checkpoint: Path) -> tuple[int, ...]:
    """Ids from generation_config.json, else from config.json; empty when neither names any.  Raises ConfigError."""
    for name in ("generation_config.json", "config.json"):
        found = _eos(checkpoint / name)
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


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
