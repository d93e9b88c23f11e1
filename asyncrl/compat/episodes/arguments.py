"""The ``args`` of one episode of slime's shape."""

import copy

from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.rollouts.interfaces import EpisodeAddress


def args_of_episode(base: SlimeArgs, address: EpisodeAddress) -> SlimeArgs:
    """Return a shallow copy of ``base`` with the address of an episode.

    The key and its secret are in the place of the host, because files build ``http://{ip}:{port}/generate``.
    ``partial_rollout`` is False whatever the run does, because functions never see an interrupted sample.
    """
    args = SlimeArgs(**{name: _copied(value) for name, value in vars(base).items()})
    args.sglang_router_ip = f"{address.key}:{address.secret}@{address.host}"
    args.sglang_router_port = address.port
    args.partial_rollout = False
    return args


def _copied[T](value: T) -> T:
    return copy.copy(value) if isinstance(value, list | dict) else value
