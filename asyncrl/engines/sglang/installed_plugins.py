"""Detect which of our SGLang plug-ins an engine has, and warn about what a run loses without them.

SGLang finds plug-ins by the entry points of the environment that starts it, group ``sglang.srt.plugins``.  A run works
without them, so only this warning reveals that they are missing.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from asyncrl.engines.sglang.labels import PLUGINS

Plugin = Literal["direct", "memory_saver", "routes", "stamps"]

_LOSSES: dict[Plugin, str] = {
    "direct": "weight updates take two to three times as long, --check-weight-updates compares nothing, and an engine "
    "that dies in an update may end the others",
    "memory_saver": "where megatron-core is installed, SGLang cannot give back the memory of CUDA graphs (--colocate)",
    "routes": "routes of experts come with the last event of a request only, behind the router not at all, and the "
    "trainer's routers choose for themselves where routes are missing",
    "stamps": "weight versions are known per chunk instead of per token, --weight-update-mode retract may reuse "
    "prefixes that older weights cached, and answers cost the driver more CPU time",
}
_MEND = (
    "install asyncrl in the environment that starts SGLang, or put a folder with its dist-info (entry_points.txt) on "
    "PYTHONPATH; SGLANG_PLUGINS, where it is set, must name them"
)
_GROUP, _PREFIX = "sglang.srt.plugins", "asyncrl_"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlugins:
    """The state of our plug-ins in one engine.  A missing plug-in is in neither field."""

    active: tuple[str, ...] = ()
    """Names of the plug-ins that are active in all schedulers of the engine."""
    refusals: Mapping[str, str]
    """Reasons why installed plug-ins are not active, by plug-in name."""

    def written(self) -> dict[str, str]:
        """The state of each plug-in, by name, in a form for a human-readable file."""
        return dict.fromkeys(self.active, "active") | dict(self.refusals)


def read_plugins(answer: Any) -> EnginePlugins:
    """Read the plug-ins from an answer of ``/server_info``, which lists all schedulers of an engine.

    Returns no plug-ins if the answer has no such entry.
    """
    states = answer.get("internal_states") if isinstance(answer, dict) else None
    notes = [state.get(PLUGINS) or {} for state in states or () if isinstance(state, dict)]
    refusals = {name: str(why) for each in notes for name, why in each.items() if why is not None}
    everywhere = set[str].intersection(*map(set, notes)) if notes else set[str]()
    return EnginePlugins(active=tuple(sorted(everywhere - refusals.keys())), refusals=refusals)


def missing_warning(engines: Mapping[str, EnginePlugins], needed: Sequence[Plugin]) -> str | None:
    """Return one warning that names all engines without a plug-in in ``needed``; None if every engine has them all."""
    lines = []
    is_absent = False
    for plugin in needed:
        absent = [name for name, each in engines.items() if plugin not in (*each.active, *each.refusals)]
        refused = {name: each.refusals[plugin] for name, each in engines.items() if plugin in each.refusals}
        why = [f"not in {', '.join(absent)}"] if absent else []
        why += [f"not active in {name} ({reason})" for name, reason in refused.items()]
        is_absent = is_absent or bool(absent)
        if why:
            lines.append(f"{_PREFIX}{plugin} is {' and '.join(why)}: {_LOSSES[plugin]}")
    if not lines:
        return None
    return "; ".join([f"SGLang runs without plug-ins of asyncrl: {lines[0]}", *lines[1:], *[_MEND] * is_absent])


def start_hint(plugin: Plugin) -> str | None:
    """Return a hint for an engine that needs ``plugin`` and did not start; None if this environment has the plug-in."""
    name, selected = f"{_PREFIX}{plugin}", os.environ.get("SGLANG_PLUGINS", "")
    is_selected = not selected or name in map(str.strip, selected.split(","))
    if is_selected and name in entry_points(group=_GROUP).names:
        return None
    return f"the plug-in {name} of SGLang is not there: {_MEND}"
