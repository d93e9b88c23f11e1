"""The whole configuration as TOML text, to repeat the run with, or as a flat mapping; and its changes at a resume."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from asyncrl.config.areas import FlagWords, RunConfig, Secret
from asyncrl.config.derived import filled_in
from asyncrl.config.eval_sets import EvalSet, eval_sets
from asyncrl.config.knobs import AREAS, PASSED_THROUGH, knobs
from asyncrl.config.secret_names import is_secret
from asyncrl.config.values import shown

UNIMPORTANT_AREAS = frozenset({"checkpoint", "failures", "evaluation", "output", "trackers"})
"""The areas whose settings do not change what a run trains."""
UNIMPORTANT = re.compile(
    r".*-timeout-(s|minutes)|gateway-.*|.*-num-workers|num-data-workers|plugin-processes|data-source-prefetch"
    r"|update-weight-disk-dir|gpu-memory-gb|reward-worker-memory-gb|check-.*"
    r"|num-layers|(ffn-)?hidden-size|num-attention-heads|num-query-groups|kv-channels"
)
"""Further settings that do not; those of the last line must equal the values in config.json."""
UNMENTIONED_AREAS = frozenset({"checkpoint", "output", "trackers"})
"""The areas whose changes are not even mentioned: folders, and ways to show numbers."""
MOST_CHANGES = 12
"""The maximum number of lines for changes that matter."""
_LONGEST = 60
"""The maximum length of a value in such a line, in characters."""


def resolved(run: RunConfig) -> str:
    """Return TOML text for ``--config``, with absolute paths.  Derived defaults are comments.

    Saved as ``{run.name}.toml``, it loads as an equal RunConfig, but for secrets, which it does not contain.
    """
    meant, lines = filled_in(run), []
    for area, cls in AREAS.items():
        lines += ["", f"# {(cls.__doc__ or '').splitlines()[0]}"]
        for knob in knobs().values():
            if knob.area != area:
                continue
            value = getattr(getattr(run, area), knob.field)
            if isinstance(value, Secret):
                lines.append(f"# {knob.name} is secret and not written")
            elif value is not None:
                lines.append(f"{knob.name} = {shown(value)}")
            elif knob.name in meant:
                lines.append(f"# {knob.name} = {shown(meant[knob.name])}")
    lines += ["", "# Held-out sets"] if run.eval_entries else []
    lines += [f"# {each.name}: {_of_set(each)}" for each in (eval_sets(run) if run.eval_entries else ())]
    for title, flags in {"# Passed through": _passed(run), "# Flags of slime and Megatron": run.foreign}.items():
        lines += ["", title] if flags else []
        lines += [
            f"# {name} is secret and not written" if is_secret(name) else f"{_key(name)} = {shown(value)}"
            for name, value in flags.items()
        ]
    return "\n".join(lines[1:]) + "\n"


def flat(run: RunConfig) -> dict[str, Any]:
    """Return the value of every flag, keyed by the name with underscores, including the server's and the router's.

    Accepted flags of slime and Megatron, and the other keys of ``--custom-config-path``, are included as well.  Secrets
    are None, except those of that file, which its user functions read.
    """
    ours = {knob.field: _public(getattr(getattr(run, knob.area), knob.field)) for knob in knobs().values()}
    others = {name: _number(value) for name, value in run.foreign.items()} | _passed(run)
    passed = {name.replace("-", "_"): None if is_secret(name) else value for name, value in others.items()}
    return passed | run.attributes | ours


def kept(run: RunConfig) -> dict[str, str]:
    """Return the settings that a checkpoint keeps, as TOML values by name: given ones, and derived defaults."""
    passed = {name: value for name, value in _passed(run).items() if not is_secret(name)}
    return {name: shown(value) for name, value in (passed | filled_in(run) | _given(run)).items()}


def changes(before: Mapping[str, str], run: RunConfig) -> tuple[str, ...]:
    """Describe in a few lines how ``run`` differs from the settings ``before``, which ``kept`` returned.

    A setting that ``before`` lacks, because an earlier version wrote it, counts as one with its default.
    """
    important, others = [], []
    for name, old, new in _differences(before, run):
        knob = knobs().get(name)
        if knob is None or not (knob.area in UNIMPORTANT_AREAS or knob.type is Path or UNIMPORTANT.fullmatch(name)):
            important.append(f"changed since the checkpoint: {name} {_short(old)} → {_short(new)}")
        elif knob.area not in UNMENTIONED_AREAS:
            others.append(name)
    lines = important[:MOST_CHANGES]
    if left := important[MOST_CHANGES:]:
        names = ", ".join(line.split(": ")[1].split(" ")[0] for line in left)
        lines.append(f"changed since the checkpoint, too: {names}")
    if others:
        lines.append(f"changed since the checkpoint, without effect on training: {', '.join(others)}")
    return tuple(lines)


def _differences(before: Mapping[str, str], run: RunConfig) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield the name, the value before, and the value now of each setting that differs.

    A setting that ``before`` lacks counts as one with its default, and a derived default then as unchanged.
    """
    now, given = kept(run), _given(run)
    for name in {**now, **before}:
        old, new, knob = before.get(name), now.get(name), knobs().get(name)
        if knob is None and not name.startswith(PASSED_THROUGH):
            continue  # a setting of another version
        if knob is not None and old is None and (name not in given or given[name] == knob.default):
            continue
        if old != new:
            yield name, old, new


def _given(run: RunConfig) -> dict[str, Any]:
    """Return the settings that have a value, but for secrets."""
    ours = {knob.name: getattr(getattr(run, knob.area), knob.field) for knob in knobs().values()}
    return {name: value for name, value in ours.items() if value is not None and not isinstance(value, Secret)}


def _short(value: str | None) -> str:
    if value is None:
        return "(not given)"
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def _public(value: Any) -> Any:
    return None if isinstance(value, Secret) else value


def _number(value: FlagWords) -> FlagWords | int | float:
    """The value as a number where it is one, as Megatron's arguments are."""
    for kind in (int, float):
        with suppress(ValueError, TypeError):
            return value if isinstance(value, bool) else kind(value)  # type: ignore[arg-type]
    return value


def _passed(run: RunConfig) -> dict[str, FlagWords]:
    return {f"sglang-{name}": value for name, value in run.sglang.items()} | {
        f"router-{name}": value for name, value in run.router.items()
    }


def _of_set(each: EvalSet) -> str:
    """The settings of a set in the file of ``--eval-config`` on one line, for a comment."""
    nested = ("name", "origin", "data", "reward")
    given = {field.name: getattr(each, field.name) for field in fields(each) if field.name not in nested}
    rewards = {"rm_type": each.reward.rm_type, "custom_rm_path": each.reward.custom_rm_path}
    keys = {"input_key": each.data.input_key, "label_key": each.data.label_key}
    return ", ".join(f"{name} {shown(value)}" for name, value in (given | rewards | keys).items() if value is not None)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else shown(name)
