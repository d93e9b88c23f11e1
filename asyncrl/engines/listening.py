"""Addresses of a run's processes: where torch listens, and how they are asked without a proxy.

torch's own rendezvous stores listen on every interface, gloo where the name of the machine points, and NCCL on the
interface of the default route.  None of them asks for a key.
"""

import importlib
import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Any

import psutil

from asyncrl.internals import Internal

_STORE = "torch.distributed.rendezvous.TCPStore"

INTERNALS = (
    Internal(name=_STORE, used_in=__name__),
    Internal(
        name="torch.distributed.rendezvous._create_c10d_store", attributes=("TCPStore", "is_master"), used_in=__name__
    ),
)
"""Names that may change with the library: see docs/internals.md."""

LOOPBACK = "127.0.0.1"
NO_PROXIES = {name: "" for each in ("http_proxy", "https_proxy", "all_proxy") for name in (each, each.upper())}
"""Variables without which a process asks everybody directly.

They are for the router, which reads ``NO_PROXY=*`` as a name, and whose engines may later have other addresses.
"""
_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_GLOO = "GLOO_SOCKET_IFNAME"
_INTERFACES = (_GLOO, "NCCL_SOCKET_IFNAME")
"""Variables that name the interface for gloo, and for the first contact between NCCL's ranks."""


def loopback_variables(host: str, environment: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on the loopback interface, if ``host`` is there; else none.

    Variables that are set already, in ``environment`` or else in this process's, keep their values.
    """
    known = os.environ if environment is None else environment
    return {name: known.get(name, "lo") for name in _INTERFACES} if host == LOOPBACK else {}


def gloo_variables(address: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variable that has gloo listen at ``address`` of this machine.

    By itself gloo listens where the name of the machine points.  On many systems that is 127.0.1.1, which no other
    machine reaches.  Of an interface it takes the first address.  Returns nothing if ``environment``, by default this
    process's, has the variable, or if the address is the first one of no interface.
    """
    if _GLOO in (os.environ if environment is None else environment):
        return {}
    for name, addresses in psutil.net_if_addrs().items():
        known = [each.address.partition("%")[0] for each in addresses if each.family in _IP_FAMILIES]
        if known[:1] == [address]:
            return {_GLOO: name}
    return {}


def url_of(host: str, port: int) -> str:
    """Return the URL of a server; ``host`` is a name or an address, also of IPv6."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def without_proxy(*hosts: str) -> dict[str, str]:
    """Return the variables with which a process asks ``hosts`` directly, besides those of this process's NO_PROXY.

    Servers of a run ask themselves and each other.  A proxy of the environment cannot reach them.
    """
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    direct = ",".join(filter(None, (known, *hosts)))
    return {"NO_PROXY": direct, "no_proxy": direct}


def bind_stores() -> None:
    """Have each store that torch's rendezvous makes in this process listen at its host's address alone.

    Stores that cannot, because the address is not this machine's or a store has the port, listen as torch has it.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    theirs = rendezvous.TCPStore
    if getattr(theirs, "is_bound", False):
        return

    # Invariant: ``_create_c10d_store`` looks the name up in this module at each call, and passes keywords only.
    def bound(**asked: Any) -> Any:
        listener = _listener(asked["host_name"], asked["port"]) if asked.get("is_master") else None
        if listener is None:
            return theirs(**asked)
        port = listener.getsockname()[1]
        return theirs(**{**asked, "port": port, "master_listen_fd": listener.detach()})

    bound.is_bound = True  # type: ignore[attr-defined]
    rendezvous.TCPStore = bound


def _listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that is bound to the address, or None if it cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError:
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        return None
    return listener
