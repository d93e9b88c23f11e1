"""Flags and keys of other programs whose names say that their values are secret.

Settings of asyncrl that are secret have the type ``Secret``.
"""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
"""The text that stands for a secret."""
_SECRET = re.compile(
    r"(?:^|[-_])(?:keys?|apikeys?|tokens?|secrets?|passwords?|passwd|passphrase|credentials?)$", re.IGNORECASE
)
_PLAIN = re.compile(r"(?:^|[-_])(?:max|min|num|total|prefill|multimodal)[-_](?:.*[-_])?(?:keys|tokens)$", re.IGNORECASE)
"""Names of counts, and of slime's ``--multimodal-keys``, which names columns."""


def is_secret(name: str) -> bool:
    """Whether ``name`` ends as the names of secrets do, as in ``api-key``, ``hf_token`` or ``oracle-password``."""
    return _SECRET.search(name) is not None and _PLAIN.search(name) is None


def masked(value: Any) -> Any:
    """Return ``value`` with a mask for each secret in a mapping in it."""
    if isinstance(value, Mapping):
        return {name: MASK if is_secret(str(name)) else masked(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return value
