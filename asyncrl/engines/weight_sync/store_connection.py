"""The way of an engine to the store of a group, which the trainer serves until it gives the group up.

torch tries for half an hour to connect, and the engine stands still meanwhile.
"""

import importlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

KNOCK_EVERY_S = 0.1
"""Seconds between two attempts to reach a store."""


def wait_until_served(address: str, port: int, within_s: float, refused_s: float) -> None:
    """Return once a group's store is served at the address.

    Raises TimeoutError, with the last failure's words: after ``refused_s`` if the port is closed, else after
    ``within_s``.
    """
    began = time.monotonic()
    while (failure := _knocked(address, port, within_s)) is not None:
        limit_s = refused_s if isinstance(failure, ConnectionRefusedError) else within_s
        if time.monotonic() > began + limit_s:
            raise TimeoutError(f"the trainer serves no store for the group at {address}:{port}: {failure}")
        time.sleep(KNOCK_EVERY_S)


def _knocked(address: str, port: int, within_s: float) -> OSError | None:
    """Connect once; return the failure."""
    try:
        socket.create_connection((address, port), timeout=within_s).close()
    except OSError as error:
        return error
    return None


@contextmanager
def connecting_within(seconds: float) -> Iterator[None]:
    """Limit the time for connecting to a store that torch's rendezvous makes within this context.

    Waits in the store keep the limit that the caller sets once there is a connection.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    theirs = rendezvous.TCPStore

    # Invariant: ``_create_c10d_store`` looks the name up in this module at each call, and passes keywords only.
    def limited(**asked: Any) -> Any:
        return theirs(**{**asked, "timeout": min(asked["timeout"], timedelta(seconds=seconds))})

    rendezvous.TCPStore = limited
    try:
        yield
    finally:
        rendezvous.TCPStore = theirs
