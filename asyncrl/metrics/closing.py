"""The closing table, which summarizes a run at its end."""

import re
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from asyncrl.metrics.history import History, SetNumbers, only_margin
from asyncrl.metrics.live_view import RunTargets, bound_of, is_over
from asyncrl.metrics.logs import LOG_FILE
from asyncrl.metrics.sinks import METRICS_FILE, TENSORBOARD_FOLDER
from asyncrl.metrics.timeline import TIMELINE_FILE
from asyncrl.metrics.words import bottleneck, change, duration, percent, share, short_s
from asyncrl.plain_text import one_line
from asyncrl.rollout_log.files import ROLLOUTS_FOLDER

_MOST_SETS = 8
"""Held-out sets with a separate row, at most."""

_FATES = ("trained", "masked", "filtered", "stale", "failed", "held")

_PLACES = {
    METRICS_FILE: "every number of every step",
    TENSORBOARD_FOLDER: "the same: tensorboard --logdir",
    ROLLOUTS_FOLDER: "every sample of every step, as Parquet files",
    TIMELINE_FILE: "who did what when: open in ui.perfetto.dev",
    LOG_FILE: "the whole log; what the servers said is in logs/",
    "model": "the final weights, in Hugging Face format",
}


def closing_table(history: History, plan: RunTargets, wall_s: float, run_dir: Path) -> Table:
    """A table of the run's results and of its files; ``history`` must have been a sink of the run."""
    table = Table(box=SIMPLE_HEAD, show_header=False, title_justify="left", title_style="bold", pad_edge=False)
    table.title = Text(f"asyncrl · {one_line(plan.name)}")
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    _add_outcome(table, history, plan, wall_s)
    _add_tokens(table, history)
    _add_timing(table, history, plan)
    _add_places(table, run_dir)
    return table


def _add_outcome(table: Table, history: History, plan: RunTargets, wall_s: float) -> None:
    table.add_row("steps", f"{_steps(history):,} of {plan.num_steps:,} in {duration(wall_s)}")
    table.add_row("held-out reward", _held_out(history))
    _add_sets(table, history)
    if history.first_reward is not None:
        table.add_row("reward", f"{history.first_reward:.3f} → {history.last_reward:.3f}")


def _steps(history: History) -> int:
    return history.steps_before + history.steps


def _held_out(history: History) -> Text:
    if history.first_held_out is None or history.last_held_out is None:
        return Text("not measured", style="dim")
    (first_step, first), (last_step, last) = history.first_held_out, history.last_held_out
    margin = only_margin(history)
    if first_step == last_step:
        return Text.assemble(change(last, last, margin), (f"  at step {last_step}", "dim"))
    means = f"{first:.3f} → {change(last, last, margin)}"
    return Text.assemble(means, (f"  at steps {first_step} → {last_step}", "dim"))


def _add_sets(table: Table, history: History) -> None:
    """Add a row per held-out set, and pass@k and majority@k for the largest k."""
    sets = list(history.last_sets.items())
    for name, now in sets[:_MOST_SETS]:
        if len(sets) > 1:
            means = change(history.first_sets[name]["reward"], now["reward"], now.get("reward_ci95"))
            table.add_row(Text(f"  {one_line(name)}"), means)
        if passes := _largest(now):
            table.add_row("", passes)
    if len(sets) > _MOST_SETS:
        table.add_row("  ...", f"{len(sets) - _MOST_SETS} more sets in {METRICS_FILE}")


def _largest(now: SetNumbers) -> str:
    """The numbers for the largest k above 1: ``pass@16 0.800, majority@16 0.600``."""
    found = []
    for kind in ("pass", "majority"):
        ks = [int(match[1]) for name in now if (match := re.fullmatch(rf"{kind}@(\d+)", name)) and match[1] != "1"]
        found += [f"{kind}@{max(ks)}"] if ks else []
    return ", ".join(f"{name} {now[name]:.3f}" for name in found)


def _add_tokens(table: Table, history: History) -> None:
    generated = history.last.get("tokens/generated", 0)
    width = len(f"{generated:,}")
    table.add_section()
    table.add_row("tokens generated", f"{generated:,}  {history.tokens_per_s:,.0f} tokens/s")
    for fate in _FATES:
        tokens = history.last.get(f"tokens/{fate}", 0)
        table.add_row(f"  {fate}", f"{tokens:>{width},}  {percent(share(tokens, generated)):>5}")
    if lost := history.last.get("tokens/lost", 0):
        table.add_row("  lost", f"{lost:>{width},}  not counted above; in flight at a kill")


def _add_timing(table: Table, history: History, plan: RunTargets) -> None:
    most = "no token trained" if history.max_lag is None else f"max {history.max_lag}, {bound_of(plan)}"
    over = history.max_lag is not None and is_over(plan, history.max_lag)
    table.add_section()
    table.add_row("lag", Text(most, style="red" if over else ""))
    if history.updates:
        table.add_row("weight updates", f"{history.updates:,}, mean pause {short_s(history.mean_pause_s)}")
    table.add_row("trainer waited", f"{percent(history.trainer_waited)} of the time")
    table.add_row("engines idle", f"{percent(history.engines_idle)} of the time")
    table.add_row("the run was", bottleneck(history.trainer_waited, history.engines_idle))


def _add_places(table: Table, run_dir: Path) -> None:
    table.add_section()
    table.add_row("where to look", Text(one_line(str(run_dir))))
    for name, meaning in _PLACES.items():
        if (run_dir / name).exists():
            table.add_row(f"  {name}", meaning)
