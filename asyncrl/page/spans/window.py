"""The part of a run that a figure shows."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asyncrl.metrics.words import duration
from asyncrl.page.spans.recording import Snapshot

_LEAST_S = 0.001
_NICE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
_NICE_HOURS = (1, 2, 3, 6, 12, 24, 48, 120, 240)
_TICKS = 10
NEWEST = "newest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Seconds of the timeline, from and to."""

    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """The length."""
        return self.stop_s - self.start_s

    def moved(self, share: float) -> "Window":
        """The same length, later by a share of it."""
        return Window(start_s=self.start_s + share * self.seconds, stop_s=self.stop_s + share * self.seconds)

    def scaled(self, factor: float) -> "Window":
        """The same middle with ``factor`` times the length."""
        more = (factor - 1) * self.seconds / 2
        return Window(start_s=self.start_s - more, stop_s=self.stop_s + more)

    def query(self) -> dict[str, str]:
        """The part of an address that names this window."""
        digits = 4 if self.seconds < 1 else 2
        return {"from": f"{self.start_s:.{digits}f}", "to": f"{self.stop_s:.{digits}f}"}


def window_of(query: Mapping[str, str], snapshot: Snapshot) -> Window:
    """Return the window that an address names; the whole run if it names none, or none that is valid."""
    whole = Window(start_s=snapshot.first_s, stop_s=max(snapshot.last_s, snapshot.first_s + 1.0))
    if "step" in query:
        return _of_step(query["step"], snapshot) or whole
    last = _number(query.get("last"))
    if last is not None:
        return Window(start_s=max(whole.start_s, whole.stop_s - max(last, _LEAST_S)), stop_s=whole.stop_s)
    start, stop = _number(query.get("from")), _number(query.get("to"))
    if start is None or stop is None or stop - start < _LEAST_S:
        return whole
    return Window(start_s=start, stop_s=stop)


def _of_step(text: str, snapshot: Snapshot) -> Window | None:
    """Return the time from the end of the step before to the end of this step, and a tenth on both sides."""
    steps = snapshot.steps
    step = max(steps, default=0) if text == NEWEST else int(text) if text.isdecimal() else -1
    if step not in steps:
        return None
    start, stop = steps[step]
    before = [earlier_stop for number, (_, earlier_stop) in steps.items() if number == step - 1]
    return Window(start_s=before[0] if before else min(start, snapshot.first_s), stop_s=stop).scaled(1.2)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def ticks(window: Window) -> Iterator[tuple[float, str]]:
    """Yield round times within the window, with their text."""
    wanted = window.seconds / _TICKS
    nice = [*_NICE_S, *(3600 * hours for hours in _NICE_HOURS)]
    width = next((each for each in nice if each >= wanted), nice[-1] * math.ceil(wanted / nice[-1]))
    for number in range(math.ceil(window.start_s / width), math.floor(window.stop_s / width) + 1):
        yield number * width, clock(number * width, width)


def clock(at_s: float, width: float = 1.0) -> str:
    """Return a time of the run as ``1:02:03``, with decimals if ``width`` is below a second."""
    if at_s < 0:
        return f"-{clock(-at_s, width)}"
    if width >= 1:
        return duration(at_s)
    digits = math.ceil(-math.log10(width) - 1e-9)
    minutes, rest = divmod(round(at_s * 10**digits), 60 * 10**digits)
    return f"{duration(60 * minutes)[:-2]}{rest / 10**digits:0{digits + 3}.{digits}f}"
