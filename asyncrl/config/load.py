"""The entry point: command line and TOML file in, one checked RunConfig out."""

from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from asyncrl.config.areas import RunConfig
from asyncrl.config.areas.evaluation import EvalConfig, EvalEntry
from asyncrl.config.areas.ranges import refuse
from asyncrl.config.command_line import Given, read_flags
from asyncrl.config.eval_file import read_eval_file
from asyncrl.config.knobs import AREAS, PASSED_THROUGH, knobs
from asyncrl.config.passthrough import owned
from asyncrl.config.problems import contradictions, missing_files
from asyncrl.config.toml_file import read_toml
from asyncrl.errors import ConfigError


def load_run(argv: Sequence[str]) -> RunConfig:
    """Return the run that ``argv`` (without the program's name) describes.  Flags override the TOML file.

    Raises ConfigError with one line per mistake, for all mistakes that can be found without correcting another first.
    With ``--dry-run`` missing files are accepted.
    """
    path, flags = read_flags(argv)
    file = read_toml(path) if path else Given(values={}, passed={}, mistakes=[])
    values = file.values | flags.values
    passed = {prefix: file.passed.get(prefix, {}) | flags.passed[prefix] for prefix in PASSED_THROUGH}
    mistakes = file.mistakes + flags.mistakes + owned(*passed.values())
    refuse(mistakes or _missing(values))
    run = _assembled(path, values, passed)
    refuse([*([] if run.output.dry_run else missing_files(run)), *contradictions(run)])
    return run


def _missing(values: dict[str, Any]) -> list[str]:
    return [
        f"--{knob.name} is missing: {knob.help}"
        for knob in knobs().values()
        if knob.default is MISSING and knob.name not in values
    ]


def _assembled(path: Path | None, values: dict[str, Any], passed: dict[str, dict[str, str | bool]]) -> RunConfig:
    areas, broken = {}, []
    for area, cls in AREAS.items():
        mine = {knob.field: values[name] for name, knob in knobs().items() if knob.area == area and name in values}
        try:
            areas[area] = cls(**mine)
        except ConfigError as error:
            broken.append(str(error))
    refuse(broken)
    entries = _entries(areas["evaluation"])
    name = path.stem if path else values["hf-checkpoint"].name
    return RunConfig(name=name, sglang=passed["sglang-"], router=passed["router-"], eval_entries=entries, **areas)


def _entries(evaluation: EvalConfig) -> tuple[EvalEntry, ...]:
    """Return the sets in the file of ``--eval-config``; none if it is missing, which ``missing_files`` reports."""
    file = evaluation.eval_config
    return read_eval_file(file) if file is not None and file.is_file() else ()
