"""The import of a function by path, and classes with one instance."""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from asyncrl.compat.episodes.loading import load

__all__ = ["Box", "SingletonMeta", "group_by", "load_function"]


@functools.cache
def load_function(path: str) -> Any:
    """Return the function of ``package.module.function``, or of ``file.py:function`` as asyncrl has it."""
    if ":" in path or path.endswith(".py"):
        return load(path)
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """Makes classes of which there is one instance per process."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the instance, which the first call makes."""
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]

    def clear_instances(cls) -> None:
        """Forget the instance of this class."""
        SingletonMeta._instances.pop(cls, None)


class Box:
    """Holds one value."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def group_by(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list[Any]]:
    """Return the items by key, in order of their first appearance."""
    found: dict[Any, list[Any]] = {}
    for item in iterable:
        found.setdefault(item if key is None else key(item), []).append(item)
    return found
