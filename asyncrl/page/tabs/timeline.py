"""The tab *Timeline*: what trainer, engines, weight updates and evaluation did, from hours to one step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from asyncrl.metrics.words import percent, short_s
from asyncrl.page.runs.run_files import RunFiles
from asyncrl.page.runs.run_status import State
from asyncrl.page.spans.activities import ENGINES, IN_FLIGHT, TRAINER, UPDATES
from asyncrl.page.spans.lanes import Total, lanes_in, totals
from asyncrl.page.spans.picture import picture
from asyncrl.page.spans.recording import Progress, Recording, timelines_in
from asyncrl.page.spans.window import NEWEST, Window, clock, window_of
from asyncrl.page.tabs.charts import figure
from asyncrl.page.tabs.tab import PageRequest, Views

PATIENCE_S = 0.4
"""Seconds that an answer waits for the reading: enough for a run of minutes, and short for a person."""
_MISSING = (
    "This run has no timeline. It was started with --no-timeline, or timeline.json is not in its folder; "
    "the curves of the overview do not need it."
)
_SHORTCUTS = {"Whole run": {}, "Last hour": {"last": "3600"}, "Last 10 minutes": {"last": "600"}}


def show(request: PageRequest) -> Mapping[str, Any]:
    """Return the values of the template."""
    files = timelines_in(request.run.path)
    if not files:
        return {"missing": _MISSING}
    return {
        "missing": "",
        "files": [path.name for path in files],
        "chosen": _chosen(request, files).name,
        "step": request.query.get("step", "").removeprefix(NEWEST),
        "shown": spans(request),
        "shortcuts": {name: _address(request, query) for name, query in _SHORTCUTS.items()}
        | {"Newest step": _address(request, {"step": NEWEST})},
    }


def spans(request: PageRequest) -> Mapping[str, Any]:
    """Return the figure and the numbers of the window that the address names."""
    files = timelines_in(request.run.path)
    if not files:
        return {"progress": _MISSING, "is_reading": False}
    recording = _recording(request.run, _chosen(request, files))
    recording.refresh(PATIENCE_S)
    progress, snapshot = recording.progress(), recording.snapshot()
    window = window_of(request.query, snapshot)
    lanes = lanes_in(snapshot, window)
    found = totals(lanes, window)
    drawn = picture(recording, snapshot, lanes, window, int(request.run.rows.last("samples/slots") or 0))
    return {
        "from": window.start_s,
        "to": window.stop_s,
        "progress": _words(progress, request.run.state, snapshot.last_s),
        "is_reading": progress.is_reading,
        "facts": _facts(found, window),
        "rows": [_row(each) for each in found],
        "links": {name: _address(request, to.query()) for name, to in _neighbours(window).items()},
        "figure": figure(drawn.traces, height=drawn.height, **drawn.layout),
    }


def _chosen(request: PageRequest, files: list[Path]) -> Path:
    """Return the timeline that the user chose; the newest one by default."""
    return next((path for path in files if path.name == request.query.get("timeline")), files[0])


def _recording(run: RunFiles, path: Path) -> Recording:
    kept: dict[Path, Recording] = run.parts.setdefault("timeline", {})
    return kept.setdefault(path, Recording(path))


def _address(request: PageRequest, window: Mapping[str, str]) -> str:
    kept = {"timeline": request.query["timeline"]} if request.query.get("timeline") else {}
    return f"?{urlencode(kept | dict(window))}"


def _neighbours(window: Window) -> dict[str, Window]:
    return {
        "Earlier": window.moved(-0.5),
        "Later": window.moved(0.5),
        "Closer": window.scaled(0.5),
        "Wider": window.scaled(2.0),
    }


def _words(progress: Progress, state: State, last_s: float) -> str:
    """Return what a person has to know about the files that were read."""
    if progress.problem:
        return f"The timeline cannot be read: {progress.problem}"
    said = []
    if progress.is_reading:
        share = progress.read_bytes / max(1, progress.total_bytes)
        size = progress.total_bytes / 2**20
        said.append(f"Reading the timeline: {percent(share)} of {size:,.0f} MiB, up to {clock(last_s)} of the run.")
    if progress.num_removed:
        said.append(f"{progress.num_removed} parts of this long timeline were removed by the run; their time is empty.")
    if state == State.RUNNING:
        said.append("Spans are recorded when they end, so the newest seconds lack what is still in progress.")
    return " ".join(said)


def _facts(found: list[Total], window: Window) -> list[tuple[str, str]]:
    """Return name and value of what a person wants to see first."""
    width = min(1.0, window.seconds / 100)
    facts = [
        ("From", clock(window.start_s, width)),
        ("To", clock(window.stop_s, width)),
        ("Shown", short_s(window.seconds)),
    ]
    facts += [(f"Trainer {each.label}", percent(each.share)) for each in found if each.lane == TRAINER][:2]
    facts += [("Engines generate", percent(each.share)) for each in found if each.lane == ENGINES][:1]
    updates = [each for each in found if each.lane == UPDATES]
    facts += [("Weight updates", f"{each.count:,} in {short_s(each.seconds)}") for each in updates]
    in_flight = sum(each.share for each in found if each.lane == IN_FLIGHT)
    return [*facts, ("Samples in flight", f"{in_flight:.1f}")]


def _row(each: Total) -> tuple[str, str, str, str, str]:
    share = f"{each.share:.1f} at once" if each.lane == IN_FLIGHT else percent(each.share)
    return each.lane, each.label, f"{each.seconds:,.2f}", share, f"{each.count:,}"


VIEWS = Views(show=show, data={"spans": spans})
