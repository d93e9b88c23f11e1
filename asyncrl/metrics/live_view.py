"""The view of a run: a live panel on a terminal, one line per step elsewhere."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from asyncrl.metrics.facts import Gauges, StepFacts
from asyncrl.metrics.history import History, only_margin
from asyncrl.metrics.sinks import Row
from asyncrl.metrics.words import bottleneck, change, duration, share, short_s, sparkline, who_waits
from asyncrl.plain_text import one_line

logger = logging.getLogger(__name__)

_REDRAWS_PER_S = 2
"""Redraws per second: enough for a clock, and calm to look at."""
_PANEL_WIDTH = 100
"""Largest width in columns: wider lines are harder to read."""
_LONGEST_SILENCE_S = 60.0
"""Seconds without output after which LineView prints the present state, also in the middle of a step."""
_MOST_SETS = 4
"""Held-out sets with a separate line, at most: the panel must fit a screen of 24 lines."""
_LINES_PER_HEADER = 20
"""Lines per header, so that a screen of 24 lines always shows one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTargets:
    """The goals of a run that a view shows."""

    name: str
    num_steps: int
    max_staleness: int | None
    """The bound on the lag of trained tokens; None in a run without engines or without a trainer, which has none."""


class View(Protocol):
    """A display of a run for a person.  Methods return at once and never raise for lack of a terminal."""

    def phase(self, text: str) -> None:
        """Start a phase that takes a while, and end the one before.  The view shows its duration."""

    def step(self, row: Row, facts: StepFacts) -> None:
        """Show a finished step, which also ends the phase."""

    def gauges(self, stats: Gauges) -> None:
        """Show the scheduler's present state.  Call every few seconds, since a step may take an hour."""

    def note(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Leave the screen as it is and release it.  May be called again."""


def open_view(mode: Literal["auto", "live", "lines"], console: Console, plan: RunTargets) -> View:
    """The view that ``--progress`` asks for; ``auto`` is live on a terminal that can draw it."""
    can_draw = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    if mode == "live" or (mode == "auto" and can_draw):
        return LiveView(console, plan)
    return LineView(console, plan)


class SafeView:
    """A view that cannot end a run: after the first exception of the view that ``opened`` returns, it is off."""

    def __init__(self, opened: Callable[[], View]) -> None:
        self._view: View | None = None
        try:
            self._view = opened()
        except Exception as error:  # noqa: BLE001 (as below)
            self._switch_off(error)

    def phase(self, text: str) -> None:
        """See ``View.phase``."""
        self._try(lambda view: view.phase(text))

    def step(self, row: Row, facts: StepFacts) -> None:
        """See ``View.step``."""
        self._try(lambda view: view.step(row, facts))

    def gauges(self, stats: Gauges) -> None:
        """See ``View.gauges``."""
        self._try(lambda view: view.gauges(stats))

    def note(self, text: str) -> None:
        """See ``View.note``."""
        self._try(lambda view: view.note(text))

    def close(self) -> None:
        """See ``View.close``."""
        self._try(lambda view: view.close())

    def _try(self, show: Callable[[View], None]) -> None:
        if self._view is None:
            return
        try:
            show(self._view)
        except Exception as error:  # noqa: BLE001 (a closed terminal, a full disk, or a bug of the view)
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        view, self._view = self._view, None
        with suppress(Exception):
            if view is not None:
                view.close()
        logger.warning("no progress is shown any more: %s: %s", type(error).__name__, error)


class LiveView:
    """A panel redrawn in place.  Other output to ``console`` or stdout scrolls above it."""

    def __init__(self, console: Console, plan: RunTargets, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._plan = plan
        self._clock = clock
        self._started_s = clock()
        self._history = History()
        self._body: tuple[RenderableType, ...] = ()
        self._phase: _Phase | None = None
        # Invariant: Rich redraws from a separate thread, also while the event loop is blocked.  That thread only reads
        # attributes that are assigned as a whole, so it never sees half an update.
        self._live = Live(get_renderable=self.__rich__, console=console, refresh_per_second=_REDRAWS_PER_S)
        self._live.start()

    def phase(self, text: str) -> None:
        """Start a phase, and end the one before."""
        self._end_phase()
        self._phase = _Phase(one_line(text), self._clock())
        self._live.refresh()

    def step(self, row: Row, facts: StepFacts) -> None:
        """Show a finished step."""
        self._end_phase()
        self._history.write(row)
        self.gauges(facts.scheduler)
        self._live.refresh()

    def gauges(self, stats: Gauges) -> None:
        """Redraw the panel with the scheduler's state; before the first step the panel shows nothing else."""
        if self._history.steps:
            self._body = (_bar(self._plan, self._history), Text(), _board(self._plan, self._history, stats))
        else:
            self._body = (Text(_meanwhile(stats)),)

    def note(self, text: str) -> None:
        """Print a line above the panel; it stays."""
        self._console.print(Text(one_line(text)))

    def close(self) -> None:
        """Leave the last panel on the screen."""
        self._phase = None
        self._live.stop()

    def _end_phase(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None and self._history.steps == 0:  # after the first step, phases repeat at every step
            took = Text(f"  {short_s(self._clock() - phase.started_s)}", style="dim")
            self._console.print(Text.assemble(("✓ ", "green"), phase.text, took))

    def __rich__(self) -> RenderableType:
        phase = self._phase
        doing = phase.draw(self._clock()) if phase else Text()
        if not self._body:
            return doing
        return Panel(
            Group(*self._body, Text(), doing),  # the line is kept when empty, so that the height never changes
            box=ROUNDED,
            border_style="dim",
            title=Text(f"asyncrl · {one_line(self._plan.name)}"),
            title_align="left",
            subtitle=f"{duration(self._clock() - self._started_s)} elapsed",
            subtitle_align="right",
            width=min(self._console.width, _PANEL_WIDTH),
            padding=(1, 2, 0, 2),
        )


class LineView:
    """One plain line per step, in columns, with a header every 20 lines.  Fits 80 columns up to 999 steps."""

    def __init__(self, console: Console, plan: RunTargets, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._plan = plan
        self._clock = clock
        self._started_s = self._said_s = clock()
        self._history = History()

    def phase(self, text: str) -> None:
        """Print that the phase begins."""
        self._say(f"[{duration(self._clock() - self._started_s)}] {text}")

    def gauges(self, stats: Gauges) -> None:
        """Print the scheduler's state, unless something was printed within the last minute."""
        if self._clock() - self._said_s >= _LONGEST_SILENCE_S:
            self.phase(_meanwhile(stats))

    def step(self, row: Row, facts: StepFacts) -> None:
        """Print the step's numbers; the reward of held-out prompts gets a separate line."""
        if self._history.steps % _LINES_PER_HEADER == 0:
            self._say(_aligned(tuple(_COLUMNS)))
        self._history.write(row)
        self._say(_aligned(_cells(self._plan, self._history, row)))
        if "eval/accuracy" in row:
            self.note(f"held-out reward {_held_out_change(self._history)}")
            for name, text in _sets(self._history, "->").items():
                self.note(f"  {name} {text}")

    def note(self, text: str) -> None:
        """Print the line."""
        self._say(text)

    def close(self) -> None:
        """Do nothing; there is nothing to release."""

    def _say(self, text: str) -> None:
        self._said_s = self._clock()
        self._console.print(Text(one_line(text)), soft_wrap=True)


class _Phase:
    def __init__(self, text: str, started_s: float) -> None:
        self.text = text
        self.started_s = started_s
        self._spinner = Spinner("dots", style="cyan")

    def draw(self, now_s: float) -> RenderableType:
        self._spinner.update(text=Text.assemble(self.text, (f" ({now_s - self.started_s:.0f} s)", "dim")))
        return self._spinner


def _bar(plan: RunTargets, history: History) -> RenderableType:
    done = int(history.last["step"]) + 1
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=plan.num_steps, completed=done, complete_style="cyan", finished_style="green")
    left = duration(_left_s(plan, history))
    grid.add_row(Text(f"step {done}/{plan.num_steps}", style="bold"), bar, Text(f"{left} left"))
    return grid


def _board(plan: RunTargets, history: History, stats: Gauges) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    row = history.last
    facts: dict[str, str | Text] = {
        "reward": _reward(history),
        "held-out": _held_out(history),
        **{f"  {name}": text for name, text in _sets(history, "→").items()},
        "generated": f"{row.get('throughput/tokens_generated_per_s', 0):,.0f} tokens/s",
        "in flight": _in_flight(stats),
        "groups": _fates(stats),
        "lag": _lag(plan, row),
        "weights": _pause(row),
        "waiting": f"{who_waits(*_waits(row))} of the step",
    }
    if stats.waits_for is not None:
        facts["outage"] = Text(stats.waits_for, style="yellow")
    for label, text in facts.items():  # as Text, because Rich reads a str as markup
        grid.add_row(Text(label), Text(text) if isinstance(text, str) else text)
    return grid


def _reward(history: History) -> Text:
    row = history.last
    number = f"{row['reward/mean']:.3f} ± {row['reward/std']:.3f}" if "reward/mean" in row else "none"
    return Text.assemble(number, "  ", (sparkline(history.rewards), "cyan"))


def _held_out(history: History) -> Text:
    if history.last_held_out is None:
        return Text("not measured", style="dim")
    return Text.assemble(_held_out_change(history, arrow="→"), (f"  at step {history.last_held_out[0]}", "dim"))


def _held_out_change(history: History, arrow: str = "->") -> str:
    if history.first_held_out is None or history.last_held_out is None:
        return "not measured"
    first, last = history.first_held_out[1], history.last_held_out[1]
    if history.first_held_out is history.last_held_out:
        first = last
    return change(first, last, only_margin(history), arrow)


def _sets(history: History, arrow: str) -> dict[str, str]:
    """The mean reward of each held-out set, by the name of the set; empty for one set, and for more than fit."""
    if not 1 < len(history.last_sets) <= _MOST_SETS:
        return {}
    return {
        one_line(name): change(history.first_sets[name]["reward"], now["reward"], now.get("reward_ci95"), arrow)
        for name, now in history.last_sets.items()
    }


def _in_flight(stats: Gauges) -> str:
    episodes = "" if stats.episodes_open is None else f"; episodes open: {stats.episodes_open:,}"
    return (
        f"{stats.samples_in_flight:,} of {stats.slots:,} samples{episodes}; groups buffered: {stats.groups.buffered:,}"
    )


def _meanwhile(stats: Gauges) -> str:
    """The state of all started groups in one line, for steps that take long to end."""
    return (
        f"{stats.tokens.generated:,} tokens; {stats.samples_in_flight:,} samples in flight; "
        f"groups: {_fates(stats) or 'none'}{'' if stats.waits_for is None else f'; {stats.waits_for}'}"
    )


def _fates(stats: Gauges) -> str:
    groups = stats.groups
    fates = {
        "in flight": groups.in_flight + groups.partial,
        "ready": groups.buffered,
        "in training": groups.training,
        "trained": groups.trained,
        f"filtered ({_main_reason(stats)})": groups.filtered,
        "stale": groups.stale,
        "failed": groups.failed,
    }
    return ", ".join(f"{count:,} {fate}" for fate, count in fates.items() if count)


def _main_reason(stats: Gauges) -> str:
    return one_line(max(stats.filter_reasons, key=lambda reason: stats.filter_reasons[reason], default=""))


def _lag(plan: RunTargets, row: Row) -> Text:
    if "lag/max" not in row:
        return Text("no token trained", style="dim")
    most = f"max {row['lag/max']}"
    color = "red" if is_over(plan, row["lag/max"]) else ""
    return Text.assemble((most, color), f", mean {row['lag/mean']:.2f}, {bound_of(plan)}")


def is_over(plan: RunTargets, lag: float) -> bool:
    """Return whether a lag is above the bound."""
    return plan.max_staleness is not None and lag > plan.max_staleness


def bound_of(plan: RunTargets) -> str:
    """Return the bound on the lag in words."""
    return "no bound" if plan.max_staleness is None else f"bound {plan.max_staleness}"


def _pause(row: Row) -> Text:
    if "time/update_pause_s" not in row:
        return Text("no update after this step", style="dim")
    return Text(f"paused {short_s(row['time/update_pause_s'])} of a {short_s(row['time/update_s'])} update")


def _waits(row: Row) -> tuple[float, float]:
    step_s = row["time/step_s"]
    return share(row["time/trainer_waited_s"], step_s), share(row["time/engines_idle_s"], step_s)


def _left_s(plan: RunTargets, history: History) -> float:
    steps = max(0, plan.num_steps - int(history.last["step"]) - 1)
    return steps * share(sum(history.recent_s), len(history.recent_s))


_COLUMNS = {
    "step": 7,
    "reward": 6,
    "tok/s": 7,
    "in flight": 9,
    "ready": 5,
    "lag": 6,
    "pause": 5,
    "left": 7,
    "who waits": 11,
}
"""Header and width of each column of LineView; ``ready`` counts groups buffered, ``lag`` is largest/mean."""


def _cells(plan: RunTargets, history: History, row: Row) -> tuple[str, ...]:
    return (
        f"{row['step'] + 1}/{plan.num_steps}",
        f"{row['reward/mean']:.3f}" if "reward/mean" in row else "-",
        f"{row.get('throughput/tokens_generated_per_s', 0):,.0f}",
        f"{row['samples/in_flight']}/{row['samples/slots']}",
        f"{row['groups/buffered']}",
        f"{row['lag/max']}/{row['lag/mean']:.2f}" if "lag/max" in row else "-",
        f"{row['time/update_pause_s']:.2f}s" if "time/update_pause_s" in row else "-",
        duration(_left_s(plan, history)),
        _waits_briefly(*_waits(row)),
    )


def _aligned(cells: tuple[str, ...]) -> str:
    *numbers, last = cells
    right = [cell.rjust(width) for cell, width in zip(numbers, _COLUMNS.values(), strict=False)]
    return "  ".join([*right, last])


def _waits_briefly(trainer_waited: float, engines_idle: float) -> str:
    trainer, engines = f"{100 * trainer_waited:.0f}", f"{100 * engines_idle:.0f}"
    return {
        "rollout-bound": f"trainer {trainer}%",
        "trainer-bound": f"engines {engines}%",
        "taking turns": f"both {trainer}/{engines}%",
        "overlapped": "neither",
    }[bottleneck(trainer_waited, engines_idle)]
