"""The command line of ``benchmarks.simulate``: the setting to simulate and its costs."""

import argparse
import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.sim.calibration.measured import read_run
from asyncrl.sim.model.costs import (
    Costs,
    EngineCosts,
    Failures,
    Sharing,
    TrainerCosts,
    UpdateCosts,
    balanced_trainer,
)
from asyncrl.sim.model.lengths import Distribution, Drawn, LogNormal, Observed, Pareto
from asyncrl.sim.model.workload import Workload
from asyncrl.sim.model.world import Schedule, Setting
from asyncrl.sim.search.scale import ENGINES, SLOTS, STEPS

AREAS: dict[str, type] = {
    "engine": EngineCosts,
    "trainer": TrainerCosts,
    "update": UpdateCosts,
    "sharing": Sharing,
    "failures": Failures,
}
"""Tables of a calibration file by name, and their types.  A flag of the command line is ``--AREA-FIELD``."""
_TABLE = tuple[tuple[float, float], ...]


def parser() -> argparse.ArgumentParser:
    """The parser of all options."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description="Compare schedules on modelled GPUs: the real scheduler on a virtual clock.",
    )
    _run_options(options.add_argument_group("the run"))
    _length_options(options.add_argument_group("answers"))
    _search_options(options.add_argument_group("the comparison"))
    _other_modes(options.add_argument_group("calibration, and the simulator itself"))
    costs = options.add_argument_group(
        "costs", "seconds, tokens and factors; default: estimates for an H200, and a balanced trainer"
    )
    for area, kind in AREAS.items():
        for field in _numbers(kind):
            kind_of = int if field.type is int else float
            costs.add_argument(
                f"--{area}-{_flag(field.name)}", type=kind_of, metavar="X", help=f"{area}.{field.name} of a calibration"
            )
    return options


def _count(least: int, text: str) -> int:
    """Parse a whole number of at least ``least``.  Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return int(text)


_AT_LEAST_ONE = partial(_count, 1)


def _add(group: Any, name: str, kind: Callable[[str], Any], text: str, default: Any = None, **more: Any) -> None:
    """Add an option; its help is ``text`` with the default, if there is one."""
    shown = f"{text} (default: {default})" if default is not None else text
    group.add_argument(name, type=kind, default=default, help=shown, **more)


def _run_options(group: Any) -> None:
    _add(group, "--gpus", partial(_count, 2), "GPUs of trainer and rollout together", 16)
    _add(group, "--rollout-gpus", _AT_LEAST_ONE, "rollout GPUs to start from (default: half of --gpus)")
    _add(group, "--gpus-per-engine", _AT_LEAST_ONE, "GPUs of each rollout engine", 1)
    _add(group, "--rollout-batch-size", _AT_LEAST_ONE, "groups per step", 32)
    _add(group, "--n-samples-per-prompt", _AT_LEAST_ONE, "samples per group", 8)
    _add(
        group,
        "--over-sampling-batch-size",
        _AT_LEAST_ONE,
        "most groups in flight per --rollout-batch-size groups needed, as in a run",
    )
    _add(group, "--async-buffer-size", _AT_LEAST_ONE, "most batches that wait for training, as in a run")


def _length_options(group: Any) -> None:
    _add(group, "--lengths", str, "answer lengths: lognormal, pareto, or the directory of a run", "lognormal")
    _add(group, "--median", float, "median answer length, in tokens", 1024)
    _add(group, "--p95-ratio", float, "95th percentile over the median, for lognormal", 8)
    _add(group, "--pareto-exponent", float, "exponent of the tail, for pareto", 1.2)
    _add(group, "--cut-ratio", float, "longest answer over the median", 16)
    _add(group, "--prompt-tokens", _AT_LEAST_ONE, "tokens of each prompt", 256)
    _add(group, "--reject", float, "share of the groups that the filter drops, 0 to 1", 0.0)
    _add(group, "--grain", _AT_LEAST_ONE, "real tokens per simulated one (default: a hundredth of the mean)")


def _search_options(group: Any) -> None:
    _add(group, "--staleness", partial(_count, 0), "values of S for policy wait", [1, 2, 4, 8], nargs="*")
    _add(group, "--mask-staleness", partial(_count, 0), "values of S for policy mask", [2], nargs="*")
    _add(group, "--intervals", _AT_LEAST_ONE, "values of k, the steps per weight update", [1, 2], nargs="+")
    _add(group, "--slots", _AT_LEAST_ONE, "values of N, the samples per engine", [8, 12, 16, 20], nargs="+")
    _add(group, "--steps", _AT_LEAST_ONE, "measured steps of each final run", 40)
    _add(group, "--short-steps", _AT_LEAST_ONE, "measured steps of each run of the search", 12)
    _add(group, "--seeds", _AT_LEAST_ONE, "final runs of each policy", 3)
    _add(group, "--processes", _AT_LEAST_ONE, "worker processes (default: the number of cores)")
    _add(group, "--picture", Path, "SVG file to write", Path("simulate.svg"))
    group.add_argument("--check", action="store_true", help="exit code 1 unless the targets hold")


def _other_modes(group: Any) -> None:
    _add(group, "--calibrate", Path, "run to fit the costs to", metavar="RUN_DIR")
    group.add_argument(
        "--scale",
        type=int,
        metavar="STEPS",
        nargs="?",
        const=STEPS,
        help=f"simulation speed with {ENGINES:,} full engines of {SLOTS} slots over STEPS steps, {STEPS} unless given",
    )
    _add(group, "--replay", Path, "run to simulate; needs --calibration", metavar="RUN_DIR")
    _add(
        group,
        "--predict",
        Path,
        "results of benchmarks.sync_vs_async to predict, calibrated on their S=2 or by --calibration",
        metavar="RESULTS_JSON",
    )
    _add(group, "--calibration", Path, "calibration file to take the costs from", metavar="FILE")
    _add(group, "--out", Path, "calibration file to write", Path("calibration.toml"), metavar="FILE")


def setting_from(options: argparse.Namespace) -> tuple[Setting, float]:
    """The setting to start from, and its ideal rate in tokens per second.  Raises ConfigError or DataError."""
    half = options.gpus // 2 // options.gpus_per_engine * options.gpus_per_engine
    rollout_gpus = options.rollout_gpus or half
    drawn = Drawn(shape=_shape(options), cut=round(options.cut_ratio * options.median))
    if isinstance(drawn.shape, Observed):
        drawn = dataclasses.replace(drawn, cut=drawn.shape.sorted_tokens[-1])
    moments, prompt = drawn.moments(), options.prompt_tokens
    costs = costs_from(options)
    if options.trainer_tokens_per_s_per_gpu is None and options.calibration is None:
        rate = balanced_trainer(
            costs.engine, moments, prompt, rollout_gpus=half, gpus_per_engine=options.gpus_per_engine, gpus=options.gpus
        )
        costs = dataclasses.replace(costs, trainer=dataclasses.replace(costs.trainer, tokens_per_s_per_gpu=rate))
    workload = Workload(
        lengths=drawn,
        prompt_tokens=prompt,
        grain=options.grain or max(1, round(moments.mean / 100)),
        rejected=options.reject,
    )
    buffered = options.async_buffer_size
    try:
        setting = Setting(
            schedule=Schedule(staleness=0, interval=1),
            costs=costs,
            workload=workload,
            gpus=options.gpus,
            rollout_gpus=rollout_gpus,
            gpus_per_engine=options.gpus_per_engine,
            slots_per_engine=max(slots for slots in options.slots if slots <= costs.engine.max_running),
            groups_per_step=options.rollout_batch_size,
            group_size=options.n_samples_per_prompt,
            steps=options.steps,
            warm_up=6,  # the first batches come from engines that all started at once
            over_sampling=options.over_sampling_batch_size,
            buffer_size=None if buffered is None else buffered * options.rollout_batch_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return setting, _filled(costs, setting).ideal_rate(moments, prompt, options.gpus, options.gpus_per_engine)


def _filled(costs: Costs, setting: Setting) -> Costs:
    """``costs`` with ``max_running`` limited to the slots, for an engine receives no more requests."""
    max_running = min(costs.engine.max_running, setting.slots_per_engine)
    return dataclasses.replace(costs, engine=dataclasses.replace(costs.engine, max_running=max_running))


def costs_from(options: argparse.Namespace) -> Costs:
    """Costs from ``--calibration`` if given, else the defaults; flags take precedence.  Raises ConfigError."""
    tables = read_calibration(options.calibration) if options.calibration else {}
    for area, kind in AREAS.items():
        flags = {field.name: getattr(options, f"{area}_{field.name}") for field in _numbers(kind)}
        given = {name: value for name, value in flags.items() if value is not None}
        if {"fixed_s", "per_request_s"} & given.keys() and tables.get(area, {}).get("by_running"):
            raise ConfigError(
                f"--engine-fixed-s, --engine-per-request-s: {options.calibration} has engine.by_running instead of both"
            )
        tables[area] = {**tables.get(area, {}), **given}
    return costs_of(tables)


def costs_of(tables: Mapping[str, Mapping[str, Any]]) -> Costs:
    """Costs from the tables of a calibration.  Raises ConfigError."""
    try:
        areas = {area: kind(**tables.get(area, {})) for area, kind in AREAS.items()}
        return Costs(**areas, **tables.get("controller", {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a calibration has an unknown field or an invalid value: {error}") from error


def read_calibration(path: Path) -> dict[str, Any]:
    """The tables of a calibration file by area.  Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _shape(options: argparse.Namespace) -> Distribution:
    if options.lengths == "lognormal":
        return LogNormal(median=options.median, p95_ratio=options.p95_ratio)
    if options.lengths == "pareto":
        return Pareto(median=options.median, exponent=options.pareto_exponent)
    lengths = read_run(Path(options.lengths)).lengths
    if not lengths:
        raise ConfigError(f"{options.lengths}: no finished samples in the timeline")
    return Observed(sorted_tokens=tuple(sorted(lengths.values())))


def _numbers(kind: type) -> list[dataclasses.Field[Any]]:
    """Fields that a flag can set; the others only a calibration file can."""
    return [field for field in dataclasses.fields(kind) if field.type not in (bool, _TABLE)]


def _flag(name: str) -> str:
    return name.replace("_", "-")
