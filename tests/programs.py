"""Commands that start modules of the tests as processes."""

import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
"""The working directory of those processes, so that they find ``asyncrl`` and ``tests``."""


def program(module: str, *arguments: object) -> list[str]:
    """The command that runs ``module`` with ``arguments``; start it in ``ROOT``."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def children_with(word: str) -> list[psutil.Process]:
    """The living descendants of this process in whose command ``word`` occurs."""
    return [child for child in psutil.Process().children(recursive=True) if word in " ".join(words_of(child))]


def words_of(process: psutil.Process) -> list[str]:
    """The command of ``process``; empty if it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
