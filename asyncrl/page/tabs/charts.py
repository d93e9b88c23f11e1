"""Figures of the page, as JSON that plotly.js draws.  Importing plotly in Python would take a second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.page.runs.rows import Points

COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")
"""Colours of lines, in this order; each has a contrast of at least 3 to white."""
MOST_POINTS = 1_500
"""Points of a line; more are not seen on a screen, and slow the browser down."""

_AXIS: Mapping[str, Any] = {"gridcolor": "#e5e7eb", "zerolinecolor": "#d1d5db", "automargin": True}
_LAYOUT: Mapping[str, Any] = {
    "template": None,
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#374151"},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
    "hovermode": "x unified",
    "uirevision": "kept",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a figure."""

    label: str
    points: Points
    dash: bool = False
    axis: str = "y"
    colour: str | None = None
    fills: bool = False
    """Whether the area is stacked on the lines before it."""


def figure(data: Sequence[Mapping[str, Any]], *, height: int = 220, **layout: Any) -> dict[str, Any]:
    """Return a figure with our looks; ``layout`` has further entries of plotly's layout."""
    return {"data": list(data), "layout": {**_LAYOUT, "height": height, **layout}}


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """Return an axis with our looks."""
    return {**_AXIS, "title": {"text": title, "standoff": 4}, **more}


def lines(parts: Sequence[Line], *, unit: str = "", height: int = 220, **layout: Any) -> dict[str, Any]:
    """Return a figure of lines over training steps, which ``sketch.js`` draws before plotly is loaded."""
    areas = iter(averaged([part.points for part in parts if part.fills]))
    drawn = [next(areas) if part.fills else thinned(part.points) for part in parts]
    data = [
        _trace(part, points, COLOURS[place % len(COLOURS)])
        for place, (part, points) in enumerate(zip(parts, drawn, strict=True))
    ]
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    drawing = figure(
        data,
        height=height,
        xaxis=axis("training step"),
        yaxis=axis(unit),
        showlegend=len(parts) > 1,
        legend=legend,
        **layout,
    )
    return drawing | {"is_lines": True}


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most about ``most`` points: of each stretch, its smallest and its largest value."""
    steps, values = points
    if len(steps) <= most:
        return points
    width = -(-2 * len(steps) // most)
    kept: list[int] = []
    for start in range(0, len(steps), width):
        stretch = range(start, min(start + width, len(steps)))
        kept += sorted({min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    return [steps[place] for place in kept], [values[place] for place in kept]


def averaged(areas: Sequence[Points], most: int = MOST_POINTS) -> Sequence[Points]:
    """Return the mean of each area over the same at most about ``most`` stretches of steps.

    Areas that lie on each other need the same steps: plotly takes a step that one of them lacks for a 0.
    """
    ends = [end for steps, _ in areas if steps for end in (steps[0], steps[-1])]
    width = (max(ends) - min(ends)) // most + 1 if ends else 1
    return areas if width == 1 else [_means(points, min(ends), width) for points in areas]


def _means(points: Points, first: int, width: int) -> Points:
    stretches: dict[int, list[float]] = {}
    for step, value in zip(*points, strict=True):
        stretches.setdefault((step - first) // width, []).append(value)
    return [first + place * width for place in stretches], [sum(each) / len(each) for each in stretches.values()]


def smoothed(points: Points, width: int) -> Points:
    """Return the mean over the last ``width`` points."""
    steps, values = points
    total, means = 0.0, []
    for place, value in enumerate(values):
        total += value - (values[place - width] if place >= width else 0.0)
        means.append(total / min(place + 1, width))
    return steps, means


def _trace(part: Line, points: Points, colour: str) -> dict[str, Any]:
    steps, values = points
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines" if len(steps) > 1 else "markers",
        "name": part.label,
        "x": steps,
        "y": values,
        "line": {"color": part.colour or colour, "width": 1.6, "dash": "dot" if part.dash else "solid"},
        "yaxis": part.axis,
    }
    if part.fills:
        trace |= {"stackgroup": "one", "line": {"color": part.colour or colour, "width": 0.5}}
    return trace
