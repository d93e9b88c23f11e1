"""Ports for servers and process groups of tests."""

import os
from collections import deque

from asyncrl.engines.cluster.actors import reserve_ports

MOST = 200
"""Ports that a process keeps: more than the cases of a test file, far fewer than the files that it may open."""

_KEPT: deque[int] = deque()


def free_ports(count: int) -> list[int]:
    """Return different TCP ports without a listener now.

    No other process of the tests gets them while they are among the last ``MOST`` of this one: many cases choose a port
    first and listen on it a minute later.
    """
    reserved = reserve_ports(count)
    _KEPT.extend(reserved.values())
    while len(_KEPT) > MOST:
        os.close(_KEPT.popleft())
    return list(reserved)
