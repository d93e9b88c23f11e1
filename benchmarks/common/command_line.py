"""Parsers of the benchmarks' command lines."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m benchmarks.NAME``; ``description`` keeps its lines."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first ``--``, and those behind it, which are flags of another program."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def add_option(group: Any, name: str, kind: Callable[[str], Any], text: str, default: Any = None, **more: Any) -> None:
    """Add an option to a parser or a group of one; its help is ``text`` with the default, if there is one."""
    shown = f"{text} (default: {default})" if default is not None else text
    group.add_argument(name, type=kind, default=default, help=shown, **more)
