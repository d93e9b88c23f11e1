"""Sums over spans of time: seconds within bins, and what the engines did."""

from dataclasses import dataclass

import numpy as np

from asyncrl.page.spans.activities import GENERATE, IDLE, PAUSED
from asyncrl.page.spans.columns import Array, Floats

type Spans = tuple[Floats, Floats]
"""Beginnings and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Activities that follow each other without a gap."""

    starts: Floats
    stops: Floats
    kinds: Array


def seconds_in(starts: Floats, stops: Floats, edges: Floats) -> Floats:
    """Return the seconds of spans between each two ``edges``; where spans overlap each other, each one counts."""
    return np.diff(_seconds_since(np.clip(starts, edges[0], edges[-1]), edges)) - np.diff(
        _seconds_since(np.clip(stops, edges[0], edges[-1]), edges)
    )


def _seconds_since(times: Floats, edges: Floats) -> Floats:
    """Return for each edge the sum of the seconds since those of ``times`` that came before it."""
    times, at = times - edges[0], edges - edges[0]
    places = np.searchsorted(at, times)  # the first edge that is not before the time
    counts = np.cumsum(np.bincount(places, minlength=len(at)))
    sums = np.cumsum(np.bincount(places, weights=times, minlength=len(at)))
    total: Floats = counts * at - sums
    return total


def engine_states(samples: Spans, pauses: Spans) -> Tiling:
    """Return what the engines did from the first sample to the last: generate, pause, or nothing."""
    starts, stops = np.sort(samples[0]), np.sort(samples[1])
    gaps = stops[:-1] < starts[1:]  # all samples that had begun had ended, and the next one came later
    idle = stops[:-1][gaps], starts[1:][gaps]
    paused = np.sort(pauses[0]), np.sort(pauses[1])
    ends = [starts[:1], stops[-1:]]
    edges = np.unique(np.concatenate([*idle, *paused, *ends]))
    edges = edges[(edges >= starts[0]) & (edges <= stops[-1])] if len(starts) else starts
    middles = (edges[1:] + edges[:-1]) / 2
    kinds = np.where(_is_open(middles, idle), IDLE, GENERATE)
    kinds = np.where(_is_open(middles, paused), PAUSED, kinds)
    return Tiling(starts=edges[:-1], stops=edges[1:], kinds=kinds.astype(np.uint8))


def _is_open(at: Floats, spans: Spans) -> Array:
    """Return whether any of ``spans`` is open; beginnings and ends are sorted."""
    opened: Array = np.searchsorted(spans[0], at, "right") > np.searchsorted(spans[1], at, "right")
    return opened
