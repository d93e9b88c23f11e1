"""The entry point: command line and TOML file in, one checked RunConfig out."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.areas import FlagWords, RunConfig
from asyncrl.config.areas.evaluation import EvalConfig, EvalEntry
from asyncrl.config.areas.ranges import must, refuse
from asyncrl.config.command_line import Given, read_flags
from asyncrl.config.custom_file import read_custom
from asyncrl.config.eval_file import read_eval_file
from asyncrl.config.knobs import AREAS, PASSED_THROUGH, knobs
from asyncrl.config.notes import notes_of
from asyncrl.config.passthrough import api_key_problems, owned, without_false
from asyncrl.config.problems import contradictions, missing_files
from asyncrl.config.slime.accepted import asked_for, unlike
from asyncrl.config.toml_file import read_toml
from asyncrl.errors import ConfigError

Program = Literal["train_async.py", "train.py"]
"""The program that was started.  ``train.py`` is synchronous."""


def load_run(argv: Sequence[str], *, program: Program = "train_async.py") -> RunConfig:
    """Return the run that ``argv`` (without the program's name) describes.  Flags override the TOML file.

    Raises ConfigError with one line per mistake, for all mistakes that can be found without correcting another first.
    With ``--dry-run`` missing files are accepted.
    """
    path, flags = read_flags(argv)
    file = read_toml(path) if path else Given(values={}, passed={}, foreign={}, mistakes=[])
    joined, attributes = _with_custom_file(_joined(file, flags))
    given = _asked_for(joined)
    refuse([*given.mistakes, *owned(*given.passed.values())] or _missing(given.values))
    refuse(_asynchronous(given.values) if program == "train.py" else [])
    implied = _imply(given.values, given.foreign, program)
    run = replace(_assembled(path, given), attributes=attributes)
    refuse(
        [
            *([] if run.output.dry_run else missing_files(run)),
            *unlike(run),
            *api_key_problems(run),
            *contradictions(run),
        ]
    )
    return _engines_alone(replace(run, notes=(*implied, *notes_of(run))))


def _engines_alone(run: RunConfig) -> RunConfig:
    """Give the engines of a run without a trainer all GPUs, and no bound on staleness: their weights never change."""
    if not run.debug.debug_rollout_only:
        return run
    most, num_gpus = max(0, run.rollout.num_rollout - 1), run.cluster.num_rollout_gpus
    note = (
        f"debug-rollout-only: no trainer starts, the engines serve {run.model.hf_checkpoint} to the end, and "
        f"max-staleness is {most}, which limits nothing"
    )
    return replace(
        run,
        cluster=replace(run.cluster, colocate=False, rollout_num_gpus=num_gpus),
        rollout=replace(run.rollout, max_staleness=most, update_weights_interval=1),
        train=replace(run.train, update_weight_transport="nccl", update_weight_disk_dir=None),
        notes=(note, *run.notes),
    )


def _joined(file: Given, flags: Given) -> Given:
    """The settings of file and command line; a flag's value replaces the file's, and None takes the file's back."""
    return Given(
        values={name: value for name, value in (file.values | flags.values).items() if value is not None},
        passed={prefix: file.passed.get(prefix, {}) | flags.passed[prefix] for prefix in PASSED_THROUGH},
        foreign=file.foreign | flags.foreign,
        mistakes=file.mistakes + flags.mistakes,
    )


def _with_custom_file(given: Given) -> tuple[Given, dict[str, Any]]:
    """Replace settings by those of ``--custom-config-path``, as slime does, and return its other keys as well."""
    path = given.values.get("custom-config-path")
    if path is None:
        return given, {}
    custom, attributes = read_custom(path)
    return _joined(given, custom), attributes


def _asked_for(given: Given) -> Given:
    """The settings without the flags that false turns off."""
    passed = {prefix: without_false(flags) for prefix, flags in given.passed.items()}
    return replace(given, passed=passed, foreign=asked_for(given.foreign))


def _asynchronous(values: Mapping[str, Any]) -> list[str]:
    """One line if ``train.py`` is to train on data of older weights."""
    staleness = values.get("max-staleness", 0)
    return must(
        staleness == 0,
        f"max-staleness {staleness} with train.py, which trains on data of the newest weights; start train_async.py "
        "instead",
    )


def _imply(values: dict[str, Any], foreign: Mapping[str, FlagWords], program: Program) -> list[str]:
    """Add the settings that follow from others to ``values``, and return one line for each that needs saying."""
    if foreign.get("bf16") is True and values.get("dtype", "auto") == "auto":
        values["dtype"] = "bfloat16"
    if "max-staleness" in values or not (values.get("colocate") or program == "train.py"):
        return []
    values["max-staleness"] = 0
    if values.get("debug-rollout-only"):  # see ``_engines_alone``
        return []
    cause = "colocate" if values.get("colocate") else "train.py"
    return [f"{cause} implies max-staleness 0: generation and training alternate"]


def _missing(values: dict[str, Any]) -> list[str]:
    return [
        f"--{knob.name} is missing: {knob.help}"
        for knob in knobs().values()
        if knob.default is MISSING and knob.name not in values
    ]


def _assembled(path: Path | None, given: Given) -> RunConfig:
    areas, broken, values = {}, [], given.values
    for area, cls in AREAS.items():
        mine = {knob.field: values[name] for name, knob in knobs().items() if knob.area == area and name in values}
        try:
            areas[area] = cls(**mine)
        except ConfigError as error:
            broken.append(str(error))
    refuse(broken)
    return RunConfig(
        name=path.stem if path else values["hf-checkpoint"].name,
        sglang=given.passed["sglang-"],
        router=given.passed["router-"],
        foreign=given.foreign,
        eval_entries=_entries(areas["evaluation"]),
        **areas,
    )


def _entries(evaluation: EvalConfig) -> tuple[EvalEntry, ...]:
    """Return the sets in the file of ``--eval-config``; none if it is missing, which ``missing_files`` reports."""
    file = evaluation.eval_config
    return read_eval_file(file) if file is not None and file.is_file() else ()
