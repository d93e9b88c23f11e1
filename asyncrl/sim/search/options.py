"""The command line of ``benchmarks/simulate.py``: what is simulated, and on what."""

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping
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
"""A calibration has a table for each; a flag is ``--AREA-FIELD``."""
_TABLE = tuple[tuple[float, float], ...]


def parser() -> argparse.ArgumentParser:
    """All options."""
    options = argparse.ArgumentParser(
        prog="simulate.py",
        description="Compare schedules on modelled GPUs: the real scheduler on a virtual clock.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _run_options(options.add_argument_group("the run"))
    _length_options(options.add_argument_group("answers"))
    _search_options(options.add_argument_group("what is compared"))
    _other_modes(options.add_argument_group("calibration, and the simulator itself"))
    costs = options.add_argument_group(
        "costs", "seconds, tokens and factors; default: an H200 estimate, trainer balanced"
    )
    for area, kind in AREAS.items():
        for field in _numbers(kind):
            kind_of = int if field.type is int else float
            costs.add_argument(
                f"--{area}-{_flag(field.name)}", type=kind_of, metavar="X", default=None, help="as needed"
            )
    return options


def _count(least: int, text: str) -> int:
    """A number of things, of which a simulation needs so many at ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return int(text)


_AT_LEAST_ONE = partial(_count, 1)


def _run_options(group: Any) -> None:
    group.add_argument("--gpus", type=partial(_count, 2), default=16, help="for trainer and rollout together")
    group.add_argument("--rollout-gpus", type=_AT_LEAST_ONE, default=None, help="the split to start from; half")
    group.add_argument("--gpus-per-engine", type=_AT_LEAST_ONE, default=1, help="of each rollout engine")
    group.add_argument("--rollout-batch-size", type=_AT_LEAST_ONE, default=32, help="groups per step")
    group.add_argument("--n-samples-per-prompt", type=_AT_LEAST_ONE, default=8, help="samples per group")
    group.add_argument("--over-sampling-batch-size", type=_AT_LEAST_ONE, default=None, help="as the flag of a run")
    group.add_argument("--async-buffer-size", type=_AT_LEAST_ONE, default=None, help="as the flag of a run")


def _length_options(group: Any) -> None:
    group.add_argument("--lengths", default="lognormal", help="lognormal, pareto, or the directory of a real run")
    group.add_argument("--median", type=float, default=1024, help="tokens")
    group.add_argument("--p95-ratio", type=float, default=8, help="95th percentile over the median, of lognormal")
    group.add_argument("--pareto-exponent", type=float, default=1.2, help="of the tail, of pareto")
    group.add_argument("--cut-ratio", type=float, default=16, help="longest answer over the median")
    group.add_argument("--prompt-tokens", type=_AT_LEAST_ONE, default=256, help="of each prompt")
    group.add_argument("--reject", type=float, default=0.0, help="share of the groups that the filter drops")
    group.add_argument(
        "--grain", type=_AT_LEAST_ONE, default=None, help="real tokens per simulated one; a hundredth of the mean"
    )


def _search_options(group: Any) -> None:
    group.add_argument("--staleness", type=partial(_count, 0), nargs="*", default=[1, 2, 4, 8], help="S, policy wait")
    group.add_argument("--mask-staleness", type=partial(_count, 0), nargs="*", default=[2], help="S, policy mask")
    group.add_argument("--intervals", type=_AT_LEAST_ONE, nargs="+", default=[1, 2], help="k")
    group.add_argument("--slots", type=_AT_LEAST_ONE, nargs="+", default=[8, 12, 16, 20], help="N, samples per engine")
    group.add_argument("--steps", type=_AT_LEAST_ONE, default=40, help="measured, of the final runs")
    group.add_argument("--short-steps", type=_AT_LEAST_ONE, default=12, help="measured, of the runs that search")
    group.add_argument("--seeds", type=_AT_LEAST_ONE, default=3, help="final runs of each policy")
    group.add_argument("--processes", type=_AT_LEAST_ONE, default=None, help="as many as cores")
    group.add_argument("--picture", type=Path, default=Path("simulate.svg"), help="where to draw it")
    group.add_argument("--check", action="store_true", help="fail unless the targets hold")


def _other_modes(group: Any) -> None:
    group.add_argument("--calibrate", type=Path, metavar="RUN_DIR", help="fit the costs to a real run")
    group.add_argument(
        "--scale",
        type=int,
        metavar="STEPS",
        nargs="?",
        const=STEPS,
        help=f"{ENGINES:,} engines with {SLOTS} slots, all full, for so many steps ({STEPS}): how fast is that?",
    )
    group.add_argument("--replay", type=Path, metavar="RUN_DIR", help="simulate a real run; needs --calibration")
    group.add_argument(
        "--predict",
        type=Path,
        metavar="RESULTS_JSON",
        help="simulate what sync_vs_async.py measured, calibrated on its S=2, or by --calibration",
    )
    group.add_argument("--calibration", type=Path, metavar="FILE", help="take the costs from here")
    group.add_argument("--out", type=Path, metavar="FILE", default=Path("calibration.toml"), help="of what is fitted")


def setting_from(options: argparse.Namespace) -> tuple[Setting, float]:
    """The setting to start from, and the ideal rate in tokens per second.  Raises ConfigError or DataError."""
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
            warm_up=6,  # the first batches come from engines that all began at once
            over_sampling=options.over_sampling_batch_size,
            buffer_size=options.async_buffer_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return setting, _filled(costs, setting).ideal_rate(moments, prompt, options.gpus, options.gpus_per_engine)


def _filled(costs: Costs, setting: Setting) -> Costs:
    """A full batch is no larger than what an engine is sent, whatever it could hold."""
    max_running = min(costs.engine.max_running, setting.slots_per_engine)
    return dataclasses.replace(costs, engine=dataclasses.replace(costs.engine, max_running=max_running))


def costs_from(options: argparse.Namespace) -> Costs:
    """From ``--calibration`` if there is one, else the defaults; flags win.  Raises ConfigError."""
    tables = read_calibration(options.calibration) if options.calibration else {}
    for area, kind in AREAS.items():
        flags = {field.name: getattr(options, f"{area}_{field.name}") for field in _numbers(kind)}
        given = {name: value for name, value in flags.items() if value is not None}
        if {"fixed_s", "per_request_s"} & given.keys() and tables.get(area, {}).get("by_running"):
            raise ConfigError(f"{options.calibration} has engine.by_running, in which both of a step's constants are")
        tables[area] = {**tables.get(area, {}), **given}
    return costs_of(tables)


def costs_of(tables: Mapping[str, Mapping[str, Any]]) -> Costs:
    """From the tables of a calibration.  Raises ConfigError."""
    try:
        areas = {area: kind(**tables.get(area, {})) for area, kind in AREAS.items()}
        return Costs(**areas, **tables.get("controller", {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a calibration has something that is not known: {error}") from error


def read_calibration(path: Path) -> dict[str, Any]:
    """Tables by area.  Raises ConfigError."""
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
    """What a flag can say; the rest only a calibration file can."""
    return [field for field in dataclasses.fields(kind) if field.type not in (bool, _TABLE)]


def _flag(name: str) -> str:
    return name.replace("_", "-")
