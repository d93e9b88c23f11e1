"""Connections that break when the machine at their other end has vanished.

A machine that has lost its power or its network closes nothing.  Its requests would wait for the longest silence that
an engine may keep.  The kernel of a machine that is there answers the probes, also while its engine is silent.
"""

import socket
from typing import Any

_PROBE_AFTER_S, _PROBE_EVERY_S, _NUM_PROBES = 15, 5, 6
"""Seconds of silence before the kernel probes the other machine, seconds between its probes, and their number."""
GONE_AFTER_S = _PROBE_AFTER_S + _PROBE_EVERY_S * _NUM_PROBES
"""Seconds after which a connection to a machine that has vanished breaks."""


def probe_machine(connection: socket.socket) -> None:
    """Have the kernel break a TCP connection ``GONE_AFTER_S`` after its other machine has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_S * 1000)  # bytes without an answer


def probing_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for a connection of aiohttp, given an entry of ``getaddrinfo``."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    probe_machine(made)
    return made
