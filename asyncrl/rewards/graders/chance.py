"""The reward that does not depend on the answer: a baseline, and a test of a run's plumbing."""

import random
from collections.abc import Mapping
from typing import Any


def coin(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 0.0 or 1.0 with equal probability."""
    return float(random.getrandbits(1))
