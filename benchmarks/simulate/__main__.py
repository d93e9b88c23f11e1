"""The best schedule for the same GPUs: the real scheduler with modelled engines on a virtual clock.

    uv run python -m benchmarks.simulate                            compare the policies, each at its best split
    uv run python -m benchmarks.simulate --check                    exit code 1 unless the targets hold
    uv run python -m benchmarks.simulate --calibrate RUN_DIR --prompt-tokens 7          fit the model to a short run
    uv run python -m benchmarks.simulate --replay RUN_DIR --calibration FILE            predict another run with it
    uv run python -m benchmarks.simulate --predict results.json --check                 predict benchmarks.sync_vs_async
    uv run python -m benchmarks.simulate --scale                    simulation speed with 1,000 full engines
    uv run python -m benchmarks.simulate --scale --check            exit code 1 unless faster than real time

``docs/simulator.md`` describes the model.  Exit codes: 0, 1 a target does not hold, 2 the options are wrong.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asyncrl.errors import ConfigError
from asyncrl.sim.calibration.calibrate import calibrate
from asyncrl.sim.calibration.replay import replay
from asyncrl.sim.calibration.tables import as_toml
from asyncrl.sim.model.world import Setting
from asyncrl.sim.search.advice import advice
from asyncrl.sim.search.options import costs_from, parser, setting_from
from asyncrl.sim.search.picture import picture
from asyncrl.sim.search.policies import SchedulingPolicy, policies
from asyncrl.sim.search.scale import ENGINES, full_fleet, measure
from asyncrl.sim.search.search import Choice, Grid, SearchResult, search
from asyncrl.sim.search.table import checks, comparison
from asyncrl.sim.search.targets import scale_verdicts, verdicts
from benchmarks.predict.costs import calibrate_on, tables
from benchmarks.predict.predicted import predicted, results_of
from benchmarks.predict.report import prediction, ratio_verdicts
from benchmarks.simulate.workers import pool_of
from benchmarks.sync_vs_async.report import title

_HALF = 0.5
"""Share of the groups rejected in the runs that show the waste."""
_WIDTH = 180
"""Columns of output that does not go to a terminal: the widest table fits."""


def main(argv: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    options, console = parser().parse_args(argv), Console()
    if not console.is_terminal:
        console.width = _WIDTH
    try:
        if options.calibrate is not None:
            return fit_model(options, console)
        if options.replay is not None:
            return predict(options, console)
        if options.predict is not None:
            return predict_ratios(options, console)
        if options.scale is not None:
            return show_scale(options, console)
        return compare(options, console)
    except ConfigError as error:
        console.print(f"error: {error}", style="red", highlight=False)
        return 2


def compare(options: argparse.Namespace, console: Console) -> int:
    """Search, and show the results."""
    base, ideal = setting_from(options)
    wanted = policies(options.staleness, options.mask_staleness, options.intervals)
    with pool_of(options.processes) as pool, _progress(console) as progress:
        found = _search(wanted, base, options, pool, progress)
        rejecting = replace(base, workload=replace(base.workload, rejected=_HALF))
        ours = {name: policy for name, policy in wanted.items() if name in ("wait S=2", "wait S=4")}
        filtered = _search(ours, rejecting, options, pool, progress)
    console.print(comparison(found, ideal, _title(base, ideal)))
    console.print(comparison(filtered, ideal, "with a filter that rejects half of the groups"))
    for line in advice(found):
        console.print(line, highlight=False, soft_wrap=True)
    judged = verdicts(found, filtered, ideal)
    console.print(checks(judged))
    options.picture.write_text(picture(found, ideal, _title(base, ideal)))
    console.print(f"picture: {options.picture}")
    return 1 if options.check and not all(verdict.holds for verdict in judged) else 0


def fit_model(options: argparse.Namespace, console: Console) -> int:
    """Calibrate on a real run."""
    fitted = calibrate(options.calibrate, options.prompt_tokens)
    options.out.write_text(fitted.toml())
    console.print(fitted.toml(), highlight=False)
    console.print(f"written to {options.out}")
    return 0


def predict(options: argparse.Namespace, console: Console) -> int:
    """Simulate a real run and show both."""
    if options.calibration is None:
        raise ConfigError("--replay needs the --calibration that a run like it was fitted to")
    seen = replay(options.replay, costs_from(options), options.prompt_tokens)
    setting = seen.setting
    console.print(
        f"k={setting.schedule.interval} S={setting.schedule.staleness} N={setting.slots_per_engine}, "
        f"{setting.groups_per_step} x {setting.group_size} samples per step, {seen.num_steps} steps: "
        f"measured {seen.measured_s:.3f} s per step (median {seen.measured_median_s:.3f}), "
        f"simulated {seen.simulated_s:.3f} s (median {seen.simulated_median_s:.3f}): {seen.error:+.1%}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def predict_ratios(options: argparse.Namespace, console: Console) -> int:
    """Simulate all arrangements of a benchmark and show both."""
    setup, runs = results_of(options.predict)
    if options.calibration is not None:
        costs, about = costs_from(options), f"By {options.calibration}."
    else:
        found = calibrate_on(options.predict, setup, runs)
        costs, about = found.costs, found.about
        options.out.write_text(as_toml(about, tables(costs)))
    seen = predicted(setup, runs, costs)
    console.print(prediction(seen, title(setup)))
    console.print(about, highlight=False, soft_wrap=True)
    judged = ratio_verdicts(seen)
    if options.check and not judged:
        raise ConfigError(f"--check: {options.predict} has no two arrangements to compare, sync one of them")
    console.print(checks(judged))
    return 1 if options.check and not all(verdict.holds for verdict in judged) else 0


def show_scale(options: argparse.Namespace, console: Console) -> int:
    """Simulate a thousand full engines and show the speed."""
    if options.scale < 1:
        raise ConfigError(f"--scale: at least 1 step, got {options.scale}")
    seen = measure(full_fleet(ENGINES, options.scale))
    console.print(
        f"{seen.num_engines:,} engines, {min(seen.in_flight):,} to {max(seen.in_flight):,} samples in flight at the "
        f"ends of {seen.num_steps} steps, {seen.decoding:,.0f} decoding on average; {seen.samples:,} samples trained",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"{seen.simulated_s:.0f} simulated s in {seen.wall_s:.0f} s on the wall ({seen.cpu_s:.0f} s of CPU): "
        f"{seen.ratio:.2f} times real time ({seen.cpu_ratio:.2f} by CPU time)",
        highlight=False,
        soft_wrap=True,
    )
    judged = scale_verdicts(seen)
    console.print(checks(judged))
    return 1 if options.check and not all(verdict.holds for verdict in judged) else 0


def _search(
    wanted: Mapping[str, SchedulingPolicy],
    base: Setting,
    options: argparse.Namespace,
    pool: Executor,
    progress: Progress,
) -> Mapping[str, SearchResult]:
    engine = options.gpus_per_engine
    grid = Grid(
        rollout_gpus=tuple(range(engine, options.gpus, engine)),
        slots_per_engine=tuple(sorted({*options.slots, base.slots_per_engine})),
    )
    start = Choice(grid.rollout_gpus.index(base.rollout_gpus), grid.slots_per_engine.index(base.slots_per_engine), 0)
    task = progress.add_task("searching", total=None)

    def tick(name: str, left: int) -> None:
        done = progress.tasks[task].completed + 1
        progress.update(task, completed=done, total=done + left, description=name)

    return search(
        wanted.values(),
        grid,
        start,
        base,
        short_steps=options.short_steps,
        seeds=range(options.seeds),
        pool=pool,
        tick=tick,
    )


def _title(base: Setting, ideal: float) -> str:
    return (
        f"{base.gpus} GPUs, {base.groups_per_step} x {base.group_size} samples per step, "
        f"answers up to {base.workload.lengths.cut:,} tokens; ideal {ideal:,.0f} tokens/s"
    )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:44}"), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
