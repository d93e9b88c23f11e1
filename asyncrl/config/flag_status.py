"""The status of any flag: a setting, a flag of slime or Megatron, or one that is passed on."""

from asyncrl.config.knobs import ALIASES, knobs
from asyncrl.config.passthrough import OWNED, passed_through
from asyncrl.config.slime.status import FlagStatus, Kind
from asyncrl.config.slime.table import TABLE

_PROGRAMS = {"sglang-": "the SGLang server", "router-": "sglang-router"}


def status_of(name: str) -> FlagStatus | None:
    """Return the status of the flag ``name``, given without leading dashes; None if it is unknown."""
    if name in TABLE:
        return TABLE[name]
    if name in knobs():
        return FlagStatus(name=name, kind=Kind.DONE, text=knobs()[name].help, setting=name)
    if name in ALIASES:
        return FlagStatus(name=name, kind=Kind.DONE, text=f"the same as --{ALIASES[name]}", setting=ALIASES[name])
    positive = name.removeprefix("no-")
    if positive != name and positive in knobs() and knobs()[positive].type is bool:
        return FlagStatus(name=name, kind=Kind.DONE, text=f"turns --{positive} off", setting=positive)
    return _passed_on(name)


def _passed_on(name: str) -> FlagStatus | None:
    target = passed_through(name)
    if target is None:
        return None
    prefix, bare = target
    if bare in OWNED[prefix]:
        return FlagStatus(name=name, kind=Kind.NOT_HERE, text=OWNED[prefix][bare])
    return FlagStatus(name=name, kind=Kind.DONE, text=f"passed on to {_PROGRAMS[prefix]}", words="many")
