"""The flags of docs/parallelism.md for a benchmark's command line."""

import argparse
from dataclasses import fields
from typing import Any, get_type_hints

from asyncrl.config.areas.parallel import ParallelConfig


def add_parallel(group: Any) -> None:
    """Add every field of ParallelConfig as an option to ``group``, a parser or a group of one."""
    hints = get_type_hints(ParallelConfig, include_extras=True)
    for field in fields(ParallelConfig):
        text: str = hints[field.name].__metadata__[0]
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            group.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        elif field.default == ():
            group.add_argument(name, nargs="*", default=(), help=text)
        elif field.name in ("recompute_granularity", "recompute_method"):
            group.add_argument(name, help=text)
        else:
            group.add_argument(name, type=int, default=field.default, help=text)


def parallel_of(asked: argparse.Namespace) -> ParallelConfig:
    """The layout that was asked for."""
    given: dict[str, Any] = {field.name: getattr(asked, field.name) for field in fields(ParallelConfig)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    return ParallelConfig(**given)
