"""The lanes of a window: their spans, and the shares of time of their activities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.page.spans.activities import ACTIVITIES, ENGINES, IN_FLIGHT, LANES, places_of
from asyncrl.page.spans.columns import Array, Floats
from asyncrl.page.spans.recording import Snapshot
from asyncrl.page.spans.summing import seconds_in
from asyncrl.page.spans.window import Window

MOST_BARS = 300
"""Spans of a lane that are drawn singly."""
MOST_SAMPLES = 2_000
"""Samples that are drawn singly."""
MOST_BINS = 400
_LEAST_BINS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The spans of one lane that touch the window."""

    name: str
    starts: Floats
    stops: Floats
    kinds: Array
    places: Array
    """Places among all spans of the snapshot, or among its samples."""

    def of(self, kind: int) -> "Lane":
        """The spans of one activity."""
        mine = self.kinds == kind
        fields = {name: getattr(self, name)[mine] for name in ("starts", "stops", "kinds", "places")}
        return Lane(name=self.name, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """One activity within the window."""

    lane: str
    label: str
    seconds: float
    """Summed over samples, of which many run at once."""
    share: float
    """Share of the window; for samples, the mean number at once."""
    count: int


def lanes_in(snapshot: Snapshot, window: Window) -> list[Lane]:
    """Return the lanes in their order, the samples last."""
    spans, samples, engines = snapshot.spans, snapshot.samples, snapshot.engines
    tracks = _lane("", spans["start"], spans["stop"], spans["kind"], window)
    found = []
    for name in LANES:
        if name == ENGINES:
            found.append(_lane(name, engines.starts, engines.stops, engines.kinds, window))
        else:
            mine = np.isin(tracks.kinds, places_of(name))
            fields = {key: getattr(tracks, key)[mine] for key in ("starts", "stops", "kinds", "places")}
            found.append(Lane(name=name, **fields))
    return [*found, _lane(IN_FLIGHT, samples["start"], samples["stop"], samples["kind"], window)]


def _lane(name: str, starts: Floats, stops: Floats, kinds: Array, window: Window) -> Lane:
    places = np.flatnonzero((starts < window.stop_s) & (stops > window.start_s))
    return Lane(name=name, starts=starts[places], stops=stops[places], kinds=kinds[places], places=places)


def edges_of(window: Window, bins: int = MOST_BINS) -> Floats:
    """Return the limits of about ``bins`` bins."""
    return np.linspace(window.start_s, window.stop_s, min(max(bins, _LEAST_BINS), MOST_BINS) + 1)


def shares_in(lane: Lane, edges: Floats) -> Mapping[int, Floats]:
    """Return the share of each bin that each activity of a lane takes; for samples, the mean number at once.

    Spans of a track may be nested.  Shares of a lane that add up to more than 1 are scaled.
    """
    widths = np.diff(edges)
    found = {kind: _summed(lane.of(kind), edges) / widths for kind in np.unique(lane.kinds).tolist()}
    if lane.name == IN_FLIGHT or not found:
        return found
    whole = np.maximum(1.0, np.sum(list(found.values()), axis=0))
    return {kind: values / whole for kind, values in found.items()}


def totals(lanes: Sequence[Lane], window: Window) -> list[Total]:
    """Return the activities that occur in the window, in their order."""
    edges = np.array([window.start_s, window.stop_s])
    found = []
    for lane in lanes:
        shares = shares_in(lane, edges)
        for kind in sorted(shares):
            share, count = float(shares[kind][0]), int((lane.kinds == kind).sum())
            label = ACTIVITIES[kind].label
            found.append(Total(lane=lane.name, label=label, seconds=share * window.seconds, share=share, count=count))
    return found


def _summed(lane: Lane, edges: Floats) -> Floats:
    return np.maximum(0.0, seconds_in(lane.starts, lane.stops, edges))
