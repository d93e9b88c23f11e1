"""The faults of a campaign: what happens, to which process, and at which moment of the run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Moment = Literal["random", "update", "commit", "start"]
"""At any time after a drawn step, within a weight update, within the commit of a checkpoint, or from the start."""
Kind = Literal["kill", "stop", "full", "reward", "second"]

VICTIMS = {
    "driver": "train_async.py",
    "router": "sglang::router",
    "actor": "ray::ServerActor",
    "front": "sglang.launch_server",
    "scheduler": "sglang::scheduler",
    "rank": "ray::RankActor",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
"""Part of the command line of each process that is killed or stopped."""
RESTARTED = ("router", "actor", "front", "scheduler", "rank")
"""The processes that a run restarts while it continues; see docs/running.md."""
DISKS = ("run-dir", "save", "transport")
REWARDS = ("hung", "slow", "away")
SECONDS = ("ports", "save")
LAST_DRAWN_STEP = 20
"""Faults happen after a step from 4 to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault at one moment."""

    kind: Kind
    target: str
    """The process, the disk, the behaviour of the reward, or what a second run shares with the first."""
    moment: Moment = "random"
    lifted_after_s: float | None = None
    """Seconds after which the fault ends by itself; None if it lasts as long as the run's processes."""

    @property
    def name(self) -> str:
        """The name in tables and in ``--only``."""
        return f"{self.kind}-{self.target}"

    @property
    def must_continue(self) -> bool:
        """Whether the run continues by itself, without a resume."""
        if self.kind in ("kill", "stop"):
            return self.target in RESTARTED or self.name == "stop-driver"
        if self.name == "reward-hung":  # for good, so that --max-failed-groups ends the run
            return False
        return self.kind in ("reward", "second") or self.name == "full-run-dir"


def all_faults() -> tuple[Fault, ...]:
    """Every fault, once per moment at which it can happen."""
    faults = [
        Fault(kind=kind, target=target, moment=moment, lifted_after_s=_pause(kind, target))
        for kind in ("kill", "stop")
        for target in VICTIMS
        for moment in ("random", "update", "commit")
    ]
    faults += [Fault(kind="full", target=disk, lifted_after_s=5.0 if disk == "run-dir" else 15.0) for disk in DISKS]
    faults += [
        Fault(kind="reward", target="hung"),
        Fault(kind="reward", target="slow", lifted_after_s=20.0),
        Fault(kind="reward", target="away", lifted_after_s=60.0),
        Fault(kind="second", target="ports", moment="start"),
        Fault(kind="second", target="save"),
    ]
    return tuple(faults)


def _pause(kind: Kind, target: str) -> float | None:
    """A stopped driver notices nothing, so that only its continuation can be observed."""
    return 20.0 if (kind, target) == ("stop", "driver") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of a campaign: its fault, and the drawn details."""

    number: int
    seed: int
    fault: Fault
    step: int
    """The fault happens after this many steps."""
    delay_s: float
    """Further delay of a fault at a random moment, in seconds."""
    rename: Literal["folder", "tracker"]
    """The rename of a checkpoint's commit before which a fault ``commit`` happens."""


def life(number: int, seed: int, only: str | None = None) -> Life:
    """Draw life ``number`` of the campaign ``seed``.

    A campaign goes through all faults in a drawn order before one is repeated.
    """
    deck = [fault for fault in all_faults() if only is None or only in (fault.name, fault.kind, named(fault))]
    random.Random(seed).shuffle(deck)
    draw = random.Random(f"{seed}-{number}")
    return Life(
        number=number,
        seed=seed,
        fault=deck[number % len(deck)],
        step=draw.randint(4, LAST_DRAWN_STEP),
        delay_s=draw.uniform(0.0, 1.5),
        rename=draw.choice(("folder", "tracker")),
    )


def named(fault: Fault) -> str:
    """The fault with its moment, as ``--only`` also accepts it."""
    return f"{fault.name}@{fault.moment}"


def names() -> Sequence[str]:
    """Everything that ``--only`` accepts."""
    found = all_faults()
    return sorted({fault.kind for fault in found} | {fault.name for fault in found} | {named(each) for each in found})
