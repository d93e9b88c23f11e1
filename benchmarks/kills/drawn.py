"""The lives of a campaign of kills: their variants, and the victims and moments that the seed draws."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.chaos.faults import Moment

Victim = Literal["driver", "rank", "engine"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)
PATTERN: tuple[Victim, ...] = ("driver", "rank", "driver", "engine")
"""Victims of consecutive lives: half of the kills meet the driver."""
NUM_STEPS = 24
SAVE_INTERVAL = 4
KILLS_PER_LIFE = 5
LAST_STEP = NUM_STEPS - 8
"""Kills happen after a step from 1 to this one.  The last steps may be done before a late kill comes."""
MOST_DELAY_S = 0.5
"""Most seconds from a drawn step to a kill at a random moment."""
START_S = 25.0
"""A kill within a start happens at most so many seconds after it: a start on two cores takes about as long."""
MOMENTS: dict[Victim, tuple[tuple[Moment, ...], tuple[int, ...]]] = {
    "driver": (("random", "start", "update", "commit"), (6, 2, 1, 1)),
    "rank": (("random", "start", "update", "commit"), (6, 1, 2, 1)),
    "engine": (("random", "update"), (3, 1)),
}
"""Moments of a kill by victim, and how often each is drawn."""
PROCESSES: dict[Victim, tuple[str, ...]] = {
    "driver": ("driver",),
    "rank": ("rank",),
    "engine": ("scheduler", "front"),
}
"""Keys of ``faults.VICTIMS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The settings in which the runs of a campaign differ."""

    model: Literal["dense", "mixture"]
    staleness: int
    is_partial: bool

    @property
    def name(self) -> str:
        """The name in tables and in ``--variant``."""
        return f"{self.model}-s{self.staleness}{'-partial' if self.is_partial else ''}"


VARIANTS = tuple(
    Variant(model=model, staleness=staleness, is_partial=is_partial)
    for model in get_args(Literal["dense", "mixture"])
    for staleness in (0, 2)
    for is_partial in (False, True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One SIGKILL."""

    process: str
    """Key of ``faults.VICTIMS``."""
    moment: Moment
    step: int
    """The kill happens after so many steps of the run, but for the moment ``start``."""
    delay_s: float
    """Seconds from the step, or from the start of the attempt."""
    rename: Literal["folder", "tracker"]
    """The rename of a checkpoint's commit before which a kill ``commit`` happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One run with its kills.  Without any, it is the run that others are compared with."""

    number: int
    seed: int
    victim: Victim | None
    variant: Variant
    num_engines: int
    kills: tuple[Kill, ...]

    @property
    def key(self) -> tuple[int, int, str | None, str]:
        """The values that tell a life from all others."""
        return self.number, self.seed, self.victim, self.variant.name

    @property
    def name(self) -> str:
        """The name of the life's folder."""
        return f"{self.victim or 'unkilled'}-{self.variant.name}-{self.seed}-{self.number}"


def lives(seed: int, only: Victim | None, variants: tuple[Variant, ...]) -> Iterator[Life]:
    """Draw the lives of a campaign, without end.

    The lives of each victim go through all ``variants`` in a drawn order before one is repeated.
    """
    places = dict.fromkeys(VICTIMS, 0)
    decks: dict[Victim, list[Variant]] = {}
    for victim in VICTIMS:
        decks[victim] = list(variants)
        random.Random(f"{seed}-{victim}").shuffle(decks[victim])
    for number, victim in enumerate(itertools.cycle(PATTERN if only is None else (only,))):
        place = places[victim]
        places[victim] += 1
        yield _life(number, seed, victim, decks[victim][place % len(variants)], place)


def unkilled(seed: int, variant: Variant) -> Life:
    """The life without kills with which those of the same seed and variant are compared."""
    return Life(number=0, seed=seed, victim=None, variant=variant, num_engines=1, kills=())


def _life(number: int, seed: int, victim: Victim, variant: Variant, place: int) -> Life:
    draw = random.Random(f"{seed}-{number}-{victim}-{variant.name}")
    steps = sorted(draw.sample(range(1, LAST_STEP + 1), KILLS_PER_LIFE))
    return Life(
        number=number,
        seed=seed,
        victim=victim,
        variant=variant,
        num_engines=1 + place % 2 if victim == "engine" else 1,
        kills=tuple(_kill(draw, victim, step, is_first=step == steps[0]) for step in steps),
    )


def _kill(draw: random.Random, victim: Victim, step: int, *, is_first: bool) -> Kill:
    moments, weights = MOMENTS[victim]
    (moment,) = draw.choices(moments, weights)
    if moment == "start" and is_first:  # nothing is there yet that could be lost
        moment = "random"
    return Kill(
        process=draw.choice(PROCESSES[victim]),
        moment=moment,
        step=step,
        delay_s=draw.uniform(0.0, START_S if moment == "start" else MOST_DELAY_S),
        rename=draw.choice(("folder", "tracker")),
    )
