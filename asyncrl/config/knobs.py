"""The settings of a run, read once from the fields of the areas.  Flags and TOML keys are generated from them."""

import difflib
import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from asyncrl.config import areas
from asyncrl.config.areas.ranges import flag

AREAS: dict[str, type[Any]] = {
    "model": areas.ModelConfig,
    "shape": areas.ShapeConfig,
    "cluster": areas.ClusterConfig,
    "parallel": areas.ParallelConfig,
    "data": areas.DataConfig,
    "rollout": areas.RolloutConfig,
    "episodes": areas.EpisodeConfig,
    "reward": areas.RewardConfig,
    "failures": areas.FailureConfig,
    "train": areas.TrainConfig,
    "checkpoint": areas.CheckpointConfig,
    "evaluation": areas.EvalConfig,
    "hooks": areas.HookConfig,
    "output": areas.OutputConfig,
    "trackers": areas.TrackerConfig,
    "debug": areas.DebugConfig,
}
"""The areas by the name of their field in RunConfig."""

ALIASES = {
    "prompt-key": "input-key",
    "reward-fn-path": "custom-rm-path",
    "rollout-generate-func-path": "custom-generate-function-path",
}
"""The alternative spellings of flags."""

PASSED_THROUGH = ("sglang-", "router-")
"""The prefixes of flags that belong to the SGLang server and to its router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A setting."""

    name: str
    """The flag without its dashes, which is also the TOML key."""
    area: str
    """The field of RunConfig that holds the setting."""
    field: str
    type: Any
    """The type of one value: bool, int, float, str, Path or Secret."""
    choices: tuple[str, ...]
    """The allowed values; empty if there is no such limit."""
    is_many: bool
    """Whether the field holds a tuple of values."""
    default: Any
    """The default value; MISSING if the setting is required."""
    help: str
    """The string in the field's annotation.  A test refuses an empty one."""


@functools.cache
def knobs() -> dict[str, Knob]:
    """All settings by name, in the order of the areas."""
    return {
        knob.name: knob
        for area, cls in AREAS.items()
        for hints in [get_type_hints(cls, include_extras=True)]
        for field in fields(cls)
        for knob in [_knob(area, field.name, hints[field.name], field.default)]
    }


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest of ``names`` to a misspelled ``name``, or None if none is close."""
    dashed = name.replace("_", "-").lower()
    return next(iter(difflib.get_close_matches(dashed, sorted(names), n=1, cutoff=0.7)), None)


def _knob(area: str, field: str, hint: Any, default: Any) -> Knob:
    kind, text = get_args(hint) if get_origin(hint) is Annotated else (hint, "")
    is_many, choices = False, ()
    if get_origin(kind) in (types.UnionType, Union):
        (kind,) = (arm for arm in get_args(kind) if arm is not types.NoneType)
    if get_origin(kind) is tuple:
        kind, is_many = get_args(kind)[0], True
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    return Knob(
        name=flag(field),
        area=area,
        field=field,
        type=kind,
        choices=choices,
        is_many=is_many,
        default=default,
        help=text,
    )
