"""The whole configuration as TOML text, to repeat the run with, or as a flat mapping."""

import re
from contextlib import suppress
from typing import Any

from asyncrl.config.areas import FlagWords, RunConfig
from asyncrl.config.derived import filled_in
from asyncrl.config.knobs import AREAS, knobs
from asyncrl.config.values import shown


def resolved(run: RunConfig) -> str:
    """Return TOML text for ``--config``, with absolute paths.  Derived defaults are comments.

    Saved as ``{run.name}.toml``, it loads as an equal RunConfig.
    """
    meant, lines = filled_in(run), []
    for area, cls in AREAS.items():
        lines += ["", f"# {(cls.__doc__ or '').splitlines()[0]}"]
        for knob in knobs().values():
            if knob.area != area:
                continue
            value = getattr(getattr(run, area), knob.field)
            if value is not None:
                lines.append(f"{knob.name} = {shown(value)}")
            elif knob.name in meant:
                lines.append(f"# {knob.name} = {shown(meant[knob.name])}")
    for title, flags in {"# Passed through": _passed(run), "# Flags of slime and Megatron": run.foreign}.items():
        lines += ["", title] if flags else []
        lines += [f"{_key(name)} = {shown(value)}" for name, value in flags.items()]
    return "\n".join(lines[1:]) + "\n"


def flat(run: RunConfig) -> dict[str, Any]:
    """Return the value of every flag, keyed by the name with underscores, including the server's and the router's.

    Accepted flags of slime and Megatron, and the other keys of ``--custom-config-path``, are included as well.
    """
    ours = {knob.field: getattr(getattr(run, knob.area), knob.field) for knob in knobs().values()}
    others = {name: _number(value) for name, value in run.foreign.items()} | _passed(run)
    return {name.replace("-", "_"): value for name, value in others.items()} | run.attributes | ours


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


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else shown(name)
