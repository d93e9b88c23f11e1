"""Ports for servers of tests."""

from asyncrl.engines.cluster.actors import NetworkPlace


def free_ports(count: int) -> list[int]:
    """Different TCP ports without a listener now."""
    return list(NetworkPlace().free_ports(count))
