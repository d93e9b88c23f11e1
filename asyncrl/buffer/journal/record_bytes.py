"""Records as bytes: JSON for small ones, ``groups`` for groups."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import orjson

from asyncrl.buffer.journal.frames import Kind
from asyncrl.buffer.journal.groups import GroupWriter, GrowthWriter, NoteFn, decoded, grown_of
from asyncrl.buffer.journal.json_text import ODD, dumps, is_storable, loads, storable
from asyncrl.buffer.journal.records import (
    Admitted,
    Delivered,
    Evaluated,
    Filtered,
    Finished,
    Grown,
    HeldGroup,
    Left,
    LeftOut,
    PromptPlace,
    Published,
    Record,
    Snapshot,
    Taken,
    Trained,
    Wasted,
)
from asyncrl.types import GroupId, Prompt

KINDS: Mapping[type[Record], Kind] = {
    Snapshot: Kind.SNAPSHOT,
    Admitted: Kind.ADMITTED,
    Finished: Kind.FINISHED,
    Filtered: Kind.FILTERED,
    Left: Kind.LEFT,
    LeftOut: Kind.LEFT_OUT,
    Wasted: Kind.WASTED,
    Taken: Kind.TAKEN,
    Trained: Kind.TRAINED,
    Published: Kind.PUBLISHED,
    Evaluated: Kind.EVALUATED,
    Delivered: Kind.DELIVERED,
    Grown: Kind.GROWN,
}
_GROUPS_AT_ONCE = 64
"""Groups of a snapshot that one step converts."""
_CLASSES = {kind: each for each, kind in KINDS.items()}


class RecordWriter:
    """The body of one record.  ``steps`` must be exhausted before ``buffers`` is read."""

    def __init__(self, record: Record, note: NoteFn) -> None:
        """``note`` is called with the names of values that JSON does not have."""
        self._record = record
        self._note = note
        self._group: GroupWriter | GrowthWriter | None = None
        if isinstance(record, Finished):
            self._group = GroupWriter(record, note)
        elif isinstance(record, Grown):
            self._group = GrowthWriter(record)
        self._buffers: list[Any] = []

    def steps(self) -> Iterator[None]:
        """Convert the record, and yield between steps of work.  Raises what ``dumps`` raises."""
        if self._group is not None:
            yield from self._group.steps()
            self._buffers = self._group.buffers()
        else:
            self._buffers.append((yield from self._text()))
            yield

    def _text(self) -> Generator[None, None, bytes]:
        match record := self._record:
            case Admitted(place=place) | LeftOut(place=place) if place.prompt is not None:
                return dumps(replace(record, place=_storable_place(place, self._note)))
            case Snapshot():
                values = {each.name: getattr(record, each.name) for each in fields(record)}
                values["held"] = yield from self._parts(record.held)
                values["state"] = self._fragment(record.state)
                return dumps(values)
            case _:
                return dumps(record, has_floats=False)

    def _parts(self, held: Sequence[HeldGroup]) -> Generator[None, None, list[orjson.Fragment]]:
        """Convert the groups of a snapshot part by part, because there may be thousands."""
        parts = []
        for start in range(0, len(held), _GROUPS_AT_ONCE):
            part = held[start : start + _GROUPS_AT_ONCE]
            parts.append(self._fragment([_storable_held(each, self._note) for each in part]))
            yield
        return parts

    def _fragment(self, value: Any) -> orjson.Fragment:
        """Return a part of the text; an odd one makes the whole text odd."""
        text = dumps(value)
        if text.startswith(ODD) and not self._buffers:
            self._buffers.append(ODD)
        return orjson.Fragment(text)

    def buffers(self) -> list[Any]:
        """Return the bytes, in pieces."""
        return self._buffers


def _storable_held(held: HeldGroup, note: NoteFn) -> HeldGroup:
    return held if held.place.prompt is None else replace(held, place=_storable_place(held.place, note))


def _storable_place(place: PromptPlace, note: NoteFn) -> PromptPlace:
    """Return the place with a prompt that JSON has."""
    prompt = place.prompt
    if prompt is None or is_storable(prompt):
        return place
    metadata, names = storable(prompt.metadata)
    others = {"label": prompt.label, "messages": prompt.messages, "template_variables": prompt.template_variables}
    kept, more = storable(others)
    note(names + more)
    without = {"label": None, "messages": None, "template_variables": {}, "metadata": metadata}
    return replace(place, prompt=replace(prompt, **without | kept))


def record_of(kind: Kind, body: memoryview) -> Record:
    """Return the record in a body.  Raises KeyError, TypeError or ValueError for other bytes."""
    if kind is Kind.FINISHED:
        return decoded(body)
    if kind is Kind.GROWN:
        return grown_of(body)
    values: dict[str, Any] = loads(bytes(body))
    changed = {name: change(values[name]) for name, change in _CHANGES.items() if name in values}
    return _CLASSES[kind](**values | changed)


def _place(values: Mapping[str, Any]) -> PromptPlace:
    prompt = values["prompt"]
    return PromptPlace(epoch=values["epoch"], row=values["row"], prompt=None if prompt is None else _prompt(prompt))


def _prompt(values: Mapping[str, Any]) -> Prompt:
    messages = values["messages"]
    changed = {
        "token_ids": tuple(values["token_ids"]),
        "messages": None if messages is None else tuple(messages),
    }
    return Prompt(**{**values, **changed})


def _held(parts: list[list[Mapping[str, Any]]]) -> tuple[HeldGroup, ...]:
    return tuple(HeldGroup(**{**group, "place": _place(group["place"])}) for part in parts for group in part)


def _pair(values: list[int] | None) -> tuple[int, int] | None:
    return None if values is None else (values[0], values[1])


def _ids(values: list[int]) -> tuple[GroupId, ...]:
    return tuple(map(GroupId, values))


def _batches(values: list[Mapping[str, Any]]) -> tuple[Taken, ...]:
    return tuple(Taken(step=each["step"], group_ids=_ids(each["group_ids"])) for each in values)


_CHANGES: Mapping[str, Callable[[Any], Any]] = {
    "place": _place,
    "held": _held,
    "last_taken": _pair,
    "group_ids": _ids,
    "pending": _batches,
}
"""Fields that JSON has in another form."""
