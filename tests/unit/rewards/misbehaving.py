"""Functions that workers call: some return, some hang, crash or eat memory.  It imports little, to load quickly."""

import ctypes
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any


def found(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = globals()[name]
    return function


def resolver(name: str) -> bytes:
    return pickle.dumps(partial(found, name))


def echo(value: Any) -> Any:
    return value


def who(value: Any) -> int:
    return os.getpid()


def in_a_c_loop(value: Any) -> int:
    return len(str(9 ** (9**8)))


def asleep(value: Any) -> None:
    time.sleep(3600)


def noted_and_asleep(path: str) -> None:
    with open(path, "a") as file:
        file.write("taken\n")
    time.sleep(3600)


def slow(value: Any) -> Any:
    time.sleep(1.0)
    return value


def gluttonous(value: Any) -> int:
    return len(bytearray(8_000_000_000))


def leaves(value: Any) -> None:
    os._exit(3)


def segfaults(value: Any) -> None:
    ctypes.string_at(0)


def exits(value: Any) -> None:
    sys.exit(5)


def raises(value: Any) -> None:
    raise KeyError(f"no {value}")


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        """Need two arguments, so that pickle cannot make this again."""
        super().__init__(f"{one} and {two}")


def raises_oddly(value: Any) -> None:
    raise Odd(1, 2)


def leaves_as_if_well(value: Any) -> None:
    os._exit(0)


class Unreadable:
    """A value that only one process can unpickle: here the driver, and as a result the worker."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return _only_in, (self.pid,)


def _only_in(pid: int) -> Unreadable:
    if pid != os.getpid():
        raise ModuleNotFoundError("No module named 'asyncrl_plugin_mine'")
    return Unreadable(pid)


def unreadable(value: Any) -> Any:
    return Unreadable(os.getpid())


def has_child(path: str) -> None:
    """Start a child, write its id to the file, and wait for it."""
    child = subprocess.Popen(["sleep", "3600"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    child.wait()


def leaves_a_child(path: str) -> None:
    child = subprocess.Popen(["sleep", "3600"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    os._exit(3)


def not_picklable(value: Any) -> Any:
    return lambda: value
