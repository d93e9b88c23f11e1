"""The figure of a timeline, as plotly's traces and layout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.metrics.words import short_s
from asyncrl.page.spans.activities import ACTIVITIES, HELD_OUT_SAMPLE, IN_FLIGHT, LANES, places_of
from asyncrl.page.spans.lanes import MOST_BARS, MOST_SAMPLES, Lane, edges_of, shares_in
from asyncrl.page.spans.recording import Recording, Snapshot
from asyncrl.page.spans.window import Window, clock, ticks

_VERSION_COLOURS = ("#1d4ed8", "#0891b2", "#65a30d", "#ca8a04", "#7c3aed")
"""Colours of samples: neighbouring versions of the weights differ."""
_LANE_PX, _AREA_PX, _SLOTS_PX, _GAP_PX, _TOP_PX, _BOTTOM_PX = 46, 120, 220, 12, 64, 28
_SPANS_PER_BIN = 8
"""Narrower bins would show single spans that begin in one bin and end in the next."""
_MOST_STEP_LINES = 80
_NUMBER_WIDTH = 0.03
"""Share of the width that the number of a step needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure: its traces, its height in pixels and further entries of its layout."""

    traces: Sequence[Mapping[str, Any]]
    height: int
    layout: Mapping[str, Any]


def picture(recording: Recording, snapshot: Snapshot, lanes: Sequence[Lane], window: Window, slots: int) -> Picture:
    """Draw ``lanes``; ``slots`` is the number of slots, 0 if it is unknown."""
    *tracks, samples = lanes
    in_slots = 0 < len(samples.places) <= MOST_SAMPLES
    rows = [*LANES, IN_FLIGHT, *(["slots"] if in_slots else [])]
    traces: list[Mapping[str, Any]] = []
    for number, lane in enumerate(tracks, 1):
        draw = _bars(lane, snapshot, number) if len(lane.places) <= MOST_BARS else _bins(lane, window, number)
        traces += draw
    traces += _area(samples, window, len(tracks) + 1)
    if in_slots:
        traces += _slots(samples, recording, snapshot, len(rows))
    height, axes = _axes(rows, slots)
    marked = _steps_in(snapshot, window)
    layout = (
        axes
        | _steps_layout(marked, window.seconds * _NUMBER_WIDTH)
        | {"xaxis": _time_axis(window, len(rows)), "uirevision": str(window.query())}
    )
    return Picture(traces=traces, height=height, layout=layout | _looks(height))


def _looks(height: int) -> dict[str, Any]:
    return {
        "barmode": "stack",
        "bargap": 0,
        "hovermode": "closest",
        "dragmode": "zoom",
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "y": 1 + 22 / (height - _TOP_PX - _BOTTOM_PX),
            "yanchor": "bottom",
        },
        "margin": {"l": 110, "r": 12, "t": _TOP_PX, "b": _BOTTOM_PX},
    }


def _axes(rows: Sequence[str], slots: int) -> tuple[int, dict[str, Any]]:
    """Return the height of a figure and its axes, one below the other."""
    sizes = [{IN_FLIGHT: _AREA_PX, "slots": _SLOTS_PX}.get(row, _LANE_PX) for row in rows]
    inner = sum(sizes) + _GAP_PX * (len(rows) - 1)
    axes, top = {}, float(inner)
    for number, (row, size) in enumerate(zip(rows, sizes, strict=True), 1):
        domain = [max(0.0, (top - size) / inner), top / inner]
        axes[_axis_name("yaxis", number)] = {"domain": domain, "fixedrange": True, **_axis_of(row, slots)}
        top -= size + _GAP_PX
    return inner + _TOP_PX + _BOTTOM_PX, axes


def _axis_of(row: str, slots: int) -> dict[str, Any]:
    line = {"gridcolor": "#e5e7eb", "zeroline": False}
    if row == IN_FLIGHT:
        limit = {"range": [0, slots * 1.05]} if slots else {"rangemode": "tozero"}
        return line | limit | {"title": {"text": "samples<br>in flight", "font": {"size": 12}}, "nticks": 4}
    if row == "slots":
        return line | {"title": {"text": "slot", "font": {"size": 12}}, "autorange": "reversed", "nticks": 6}
    return {"range": [0, 1], "tickvals": [0.5], "ticktext": [row], "showgrid": False, "zeroline": False}


def _axis_name(kind: str, number: int) -> str:
    return kind if number == 1 else f"{kind}{number}"


def _time_axis(window: Window, num_rows: int) -> dict[str, Any]:
    marks = list(ticks(window))
    return {
        "range": [window.start_s, window.stop_s],
        "tickvals": [at for at, _ in marks],
        "ticktext": [text for _, text in marks],
        "anchor": _axis_name("y", num_rows),
        "gridcolor": "#f3f4f6",
        "zeroline": False,
    }


def _bars(lane: Lane, snapshot: Snapshot, number: int) -> Iterator[dict[str, Any]]:
    """Yield one trace of single bars for each activity."""
    for kind in places_of(lane.name):
        mine = lane.of(kind)
        if not len(mine.places):
            continue
        colour = ACTIVITIES[kind].colour
        yield _named(kind, number) | {
            "type": "bar",
            "x": (mine.starts + mine.stops) / 2,
            "y": np.ones(len(mine.places)),
            "width": mine.stops - mine.starts,
            "marker": {"color": colour, "line": {"color": colour, "width": 1}},  # a short span stays visible
            "hovertext": _hover(mine, kind, snapshot),
            "hoverinfo": "text",
        }


def _named(kind: int, number: int) -> dict[str, Any]:
    return {"name": ACTIVITIES[kind].label, "yaxis": _axis_name("y", number), "xaxis": "x"}


def _hover(lane: Lane, kind: int, snapshot: Snapshot) -> list[str]:
    is_named = lane.name != "engines"
    names = [snapshot.texts[place] if is_named else (ACTIVITIES[kind].label, {}) for place in lane.places.tolist()]
    spans = zip(names, lane.starts.tolist(), lane.stops.tolist(), strict=True)
    return [_hover_text(name, args, start, stop) for (name, args), start, stop in spans]


def _hover_text(name: str, args: Mapping[str, Any], start: float, stop: float) -> str:
    values = "".join(f"<br>{key}: {_plain(value)}" for key, value in args.items())
    return f"<b>{_plain(name)}</b><br>{short_s(stop - start)} from {clock(start, 0.01)}{values}"


def _plain(value: Any) -> str:
    """Return text for a hover label, which knows some elements of HTML."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _bins(lane: Lane, window: Window, number: int) -> Iterator[dict[str, Any]]:
    """Yield one trace of stacked bars for each activity: its share of each bin."""
    edges = edges_of(window, len(lane.places) // _SPANS_PER_BIN)
    for kind, shares in sorted(shares_in(lane, edges).items()):
        used = shares > 0
        yield _named(kind, number) | {
            "type": "bar",
            "x": ((edges[1:] + edges[:-1]) / 2)[used],
            "y": shares[used].round(4),
            "width": float(edges[1] - edges[0]),
            "marker": {"color": ACTIVITIES[kind].colour, "line": {"width": 0}},
            "hovertemplate": f"{ACTIVITIES[kind].label}: %{{y:.0%}} of {short_s(edges[1] - edges[0])}<extra></extra>",
        }


def _area(samples: Lane, window: Window, number: int) -> Iterator[dict[str, Any]]:
    """Yield the mean number of samples at once in each bin."""
    edges = edges_of(window)
    for kind, counts in sorted(shares_in(samples, edges).items()):
        yield _named(kind, number) | {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "samples",
            "x": edges,
            "y": np.append(counts, counts[-1]).round(3),
            "line": {"shape": "hv", "width": 0.5, "color": ACTIVITIES[kind].colour},
            "hovertemplate": f"%{{y:.1f}} {ACTIVITIES[kind].label} in flight<extra></extra>",
        }


def _slots(samples: Lane, recording: Recording, snapshot: Snapshot, number: int) -> Iterator[dict[str, Any]]:
    """Yield each sample as a bar in its slot, in a colour of the version of its weights."""
    events = recording.events_of(samples.places)
    args = [event.get("args", {}) for event in events]
    colours = [_colour_of(each.get("version")) for each in args]
    held_out = samples.kinds == HELD_OUT_SAMPLE
    pink = ACTIVITIES[HELD_OUT_SAMPLE].colour
    spans = zip(events, args, samples.starts.tolist(), samples.stops.tolist(), strict=True)
    yield {
        "type": "bar",
        "orientation": "h",
        "xaxis": "x",
        "yaxis": _axis_name("y", number),
        "base": samples.starts,
        "x": samples.stops - samples.starts,
        "y": snapshot.samples["slot"][samples.places],
        "width": 0.86,
        "marker": {
            "color": [pink if is_held_out else colour for is_held_out, colour in zip(held_out, colours, strict=True)],
            "line": {"color": "#ffffff", "width": 0.5},
        },
        "hovertext": [
            _hover_text(event.get("name", "a sample whose part of the timeline was removed"), each, start, stop)
            for event, each, start, stop in spans
        ],
        "hoverinfo": "text",
        "showlegend": False,
    }


def _colour_of(version: Any) -> str:
    """Return the colour of a version; a damaged timeline may have any value in its place."""
    return _VERSION_COLOURS[version % len(_VERSION_COLOURS) if isinstance(version, int) else 0]


def _steps_in(snapshot: Snapshot, window: Window) -> list[tuple[int, float]]:
    """Return the number and the end of each step that is marked."""
    ends = [(step, stop) for step, (_, stop) in snapshot.steps.items() if window.start_s <= stop <= window.stop_s]
    every = next(width for width in _nice_numbers() if len(ends) <= _MOST_STEP_LINES * width)
    return [(step, stop) for step, stop in ends if step % every == 0]


def _steps_layout(marked: Sequence[tuple[int, float]], room_s: float) -> dict[str, Any]:
    """Return thin lines at the ends of steps, and their numbers where they have room."""
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    text = {"yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 11, "color": "#4b5563"}}
    numbered: list[tuple[int, float]] = []
    for step, at in marked:
        if not numbered or at - numbered[-1][1] >= (room_s if len(numbered) > 1 else 1.5 * room_s):
            numbered.append((step, at))
    return {
        "shapes": [line | {"x0": at, "x1": at, "line": {"color": "#9ca3af", "width": 0.7}} for _, at in marked],
        "annotations": [
            text | {"x": at, "text": f"step {step}" if place == 0 else str(step)}
            for place, (step, at) in enumerate(numbered)
        ],
    }


def _nice_numbers() -> Iterator[int]:
    width = 1
    while True:
        yield from (width, 2 * width, 5 * width)
        width *= 10
