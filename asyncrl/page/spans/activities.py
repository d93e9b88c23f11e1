"""The activities that a timeline shows, each in a lane."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.metrics.timeline import SAMPLES, TRACKS

TRAINER, ENGINES, UPDATES, EVALUATION = LANES = ("trainer", "engines", "weight updates", "evaluation")
IN_FLIGHT = "samples in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One kind of activity.  Its place in ``ACTIVITIES`` is its number."""

    lane: str
    label: str
    colour: str
    names: str = ""
    """Regular expression of the names in the timeline."""


_WAITING = "#f59e0b"
ACTIVITIES: Sequence[Activity] = (
    Activity(lane=TRAINER, label="trains", colour="#2563eb", names=r"step \d+"),
    Activity(lane=TRAINER, label="waits for a batch", colour=_WAITING, names="wait for a batch"),
    Activity(lane=TRAINER, label="waits for something else", colour="#b45309", names="wait for .*|take the GPUs"),
    Activity(lane=TRAINER, label="copies weights", colour="#7c3aed", names="weights taken"),
    Activity(lane=TRAINER, label="saves", colour="#0f766e", names="save|checkpoint .*"),
    Activity(lane=TRAINER, label="other work", colour="#6b7280", names=".*"),
    Activity(lane=ENGINES, label="generate", colour="#059669"),
    Activity(lane=ENGINES, label="paused for new weights", colour="#a855f7"),
    Activity(lane=ENGINES, label="no sample in flight", colour="#fbbf24"),
    Activity(lane=UPDATES, label="update", colour="#7c3aed"),
    Activity(lane=EVALUATION, label="evaluates", colour="#db2777"),
    Activity(lane=IN_FLIGHT, label="training samples", colour="#10b981"),
    Activity(lane=IN_FLIGHT, label="held-out samples", colour="#ec4899"),
)
_PLACES = {(each.lane, each.label): place for place, each in enumerate(ACTIVITIES)}
TRAINS, UPDATE = _PLACES[TRAINER, "trains"], _PLACES[UPDATES, "update"]
GENERATE, PAUSED, IDLE = (
    _PLACES[ENGINES, label] for label in ("generate", "paused for new weights", "no sample in flight")
)
TRAINING_SAMPLE, HELD_OUT_SAMPLE = (_PLACES[IN_FLIGHT, label] for label in ("training samples", "held-out samples"))
_OF_TRAINER = [
    (place, re.compile(each.names, re.DOTALL)) for place, each in enumerate(ACTIVITIES) if each.lane == TRAINER
]
_TRAINING_NAME = re.compile(r"g\d")


def activity_of(event: dict[str, Any]) -> int:
    """Return the number of the activity of a span."""
    process, name = event["pid"], event["name"]
    if process == SAMPLES:
        return TRAINING_SAMPLE if _TRAINING_NAME.match(name) else HELD_OUT_SAMPLE
    if process == TRACKS["engines"]:
        return UPDATE
    if process == TRACKS["evaluation"]:
        return _PLACES[EVALUATION, "evaluates"]
    return next(place for place, pattern in _OF_TRAINER if pattern.fullmatch(name))


def places_of(lane: str) -> list[int]:
    """Return the numbers of the activities of ``lane``."""
    return [place for place, each in enumerate(ACTIVITIES) if each.lane == lane]
