"""Commands that start modules of the tests as processes."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The working directory of those processes, so that they find ``asyncrl`` and ``tests``."""


def program(module: str, *arguments: object) -> list[str]:
    """The command that runs ``module`` with ``arguments``; start it in ``ROOT``."""
    return [sys.executable, "-m", module, *map(str, arguments)]
