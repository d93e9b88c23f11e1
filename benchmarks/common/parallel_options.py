"""The flags of docs/parallelism.md for a benchmark of its own."""

import argparse
from dataclasses import fields
from typing import Any

from asyncrl.config.parallel import ParallelConfig


def add_parallel(group: Any) -> None:
    """Every field of ParallelConfig as an option of ``group``, a parser or a group of one."""
    for field in fields(ParallelConfig):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            group.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        elif field.default == ():
            group.add_argument(name, nargs="*", default=())
        elif field.name in ("recompute_granularity", "recompute_method"):
            group.add_argument(name)
        else:
            group.add_argument(name, type=int, default=field.default)


def parallel_of(asked: argparse.Namespace) -> ParallelConfig:
    """What was asked for."""
    given: dict[str, Any] = {field.name: getattr(asked, field.name) for field in fields(ParallelConfig)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    return ParallelConfig(**given)
