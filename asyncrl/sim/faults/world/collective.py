"""The collectives between the trainer and the engines: groups that form, broadcasts, and paths that are cut."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from asyncrl.sim.faults.world.plan import Weather

TRAINER = -1
"""The trainer's number in a group."""
Joined = Callable[[str | None], None]
"""Called once a group is formed, or with the reason why it never will be."""
Received = Callable[[int | None, str | None], None]
"""Called with the step of the weights that a member received, or with the reason why it received none."""


@dataclass(slots=True)
class _Group:
    size: int = 0
    joined: dict[int, Joined] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    """The members, once all have joined; some may have died since."""
    dead: set[int] = field(default_factory=set)
    """Members that have died.  A process that is started in the place of one is no member."""
    receiving: dict[int, tuple[int, Received]] = field(default_factory=dict)
    sending: tuple[int, int] | None = None
    """Step of the weights that the trainer broadcasts, and the buckets that are left."""
    on_sent: Callable[[], None] = lambda: None
    is_served: bool = False
    """Whether the trainer serves the store in which members wait for each other, or has served it."""
    is_abandoned: bool = False


class Collectives:
    """All groups of one process of a life."""

    def __init__(self, weather: Weather, address_of: Callable[[int], str]) -> None:
        self._weather = weather
        self._address_of = address_of
        self._groups = dict[str, _Group]()

    def serve(self, name: str) -> None:
        """Serve a group's store, unless the group was given up before."""
        self._groups.setdefault(name, _Group()).is_served = True

    def join(self, name: str, size: int, member: int, joined: Joined) -> None:
        """Let a member join; ``joined`` is called once all are there."""
        group = self._groups.setdefault(name, _Group())
        group.size = size
        if group.is_abandoned:
            joined("the group was abandoned")
            return
        group.joined[member] = joined
        if len(group.joined) == group.size:
            waiting, group.joined = group.joined, {}
            group.members = set(waiting)
            for tell in waiting.values():
                tell(None)

    def is_served(self, name: str) -> bool:
        """Return whether the trainer serves a group's store now."""
        group = self._groups.get(name)
        return group is not None and group.is_served and not group.is_abandoned

    def is_abandoned(self, name: str) -> bool:
        """Return whether a group was given up, so that its store is served no longer."""
        group = self._groups.get(name)
        return group is not None and group.is_abandoned

    def give_up(self, name: str, member: int) -> bool:
        """Have a member wait no longer if it waits for a store that is not served; return whether it did."""
        group = self._groups[name]
        return not group.is_served and group.joined.pop(member, None) is not None

    def send(self, name: str, step: int, num_buckets: int, on_sent: Callable[[], None]) -> None:
        """Broadcast weights to a group; ``on_sent`` is called once all have received them."""
        group = self._groups.get(name)
        if group is None or group.is_abandoned:
            return
        group.sending, group.on_sent = (step, num_buckets), on_sent
        self._pass(group)

    def has(self, name: str, member: int) -> bool:
        """Return whether a member may receive in a group: it is formed, and was not abandoned."""
        group = self._groups.get(name)
        return group is not None and not group.is_abandoned and member in group.members - group.dead

    def receive(self, name: str, member: int, num_buckets: int, received: Received) -> None:
        """Receive the next buckets of a group's broadcast."""
        if not self.has(name, member):
            received(None, f"no group {name}")
            return
        group = self._groups[name]
        group.receiving[member] = (num_buckets, received)
        self._pass(group)

    def abandon(self, name: str) -> None:
        """Give up a group: no member waits in it any longer, and none can join it."""
        group = self._groups.setdefault(name, _Group())
        group.is_abandoned = True
        joined, receiving, group.joined, group.receiving = group.joined, group.receiving, {}, {}
        for tell in joined.values():
            tell("the group was abandoned")
        for _, received in receiving.values():
            received(None, "the group was abandoned")

    def abandon_all(self) -> None:
        """Give up all groups that there are: the trainer has died, and serves no store any longer."""
        for name in tuple(self._groups):  # an engine that is free again may join another group
            self.abandon(name)

    def leave(self, member: int) -> None:
        """Note the death of an engine: its groups never come together again."""
        for group in self._groups.values():
            group.joined.pop(member, None)
            group.receiving.pop(member, None)
            group.dead |= {member} & group.members

    def read(self, folder: str) -> int:
        """Return the step of the weights in a folder.  Raises OSError."""
        step: int = orjson.loads((Path(folder) / "weights.json").read_bytes())["step"]
        return step

    def _pass(self, group: _Group) -> None:
        """Pass buckets on if the trainer and all engines are ready, and no path is cut."""
        engines = group.members - {TRAINER}
        if group.sending is None or group.receiving.keys() != engines or any(map(self._is_cut, engines)):
            return
        step, left = group.sending
        receiving, group.receiving = group.receiving, {}
        left -= next(iter(receiving.values()))[0]
        group.sending = (step, left) if left > 0 else None
        for _, received in receiving.values():
            received(step, None)
        if left <= 0:
            group.on_sent()

    def _is_cut(self, member: int) -> bool:
        return member != TRAINER and self._weather.lasting("trainer_partition", self._address_of(member)) > 0
