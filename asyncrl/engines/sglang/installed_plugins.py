"""Which of our plug-ins an engine has, what a run loses without them, and how that is mended.

SGLang finds them by the entry points of the environment that starts it, group ``sglang.srt.plugins``.  Without them a
run works, which is why somebody has to say so.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from asyncrl.engines.sglang.labels import PLUGINS

Plugin = Literal["direct", "memory_saver", "stamps"]

_LOSSES: dict[Plugin, str] = {
    "direct": "weight updates take two to three times as long, --check-weight-updates compares nothing, and an engine "
    "that dies in an update may end the others",
    "memory_saver": "where megatron-core is installed, SGLang cannot give back the memory of CUDA graphs (--colocate)",
    "stamps": "which weights made a token is known to the chunk only, --weight-update-mode retract may reuse prefixes "
    "that older weights cached, and answers cost the driver more CPU time",
}
_MEND = (
    "install asyncrl in the environment that starts SGLang, or put a folder with its dist-info (entry_points.txt) on "
    "PYTHONPATH; SGLANG_PLUGINS, where it is set, must name them"
)
_GROUP, _PREFIX = "sglang.srt.plugins", "asyncrl_"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlugins:
    """What one engine says of our plug-ins; those that it does not have are in neither."""

    active: tuple[str, ...] = ()
    refusals: Mapping[str, str]
    """Why a plug-in that is installed did not become active, by its name."""

    def written(self) -> dict[str, str]:
        """By plug-in, for a file that people read."""
        return dict.fromkeys(self.active, "active") | dict(self.refusals)


def read_plugins(answer: Any) -> EnginePlugins:
    """What ``/server_info`` says, by all schedulers of an engine; none where there is no such entry."""
    states = answer.get("internal_states") if isinstance(answer, dict) else None
    notes = [state.get(PLUGINS) or {} for state in states or () if isinstance(state, dict)]
    refusals = {name: str(why) for each in notes for name, why in each.items() if why is not None}
    everywhere = set[str].intersection(*map(set, notes)) if notes else set[str]()
    return EnginePlugins(active=tuple(sorted(everywhere - refusals.keys())), refusals=refusals)


def missing_warning(engines: Mapping[str, EnginePlugins], needed: Sequence[Plugin]) -> str | None:
    """One warning for all engines, by name, that lack a plug-in which this run uses; None when none does."""
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
    """What to say of an engine that needs ``plugin`` and did not start, unless this environment has the plug-in."""
    name, selected = f"{_PREFIX}{plugin}", os.environ.get("SGLANG_PLUGINS", "")
    is_selected = not selected or name in map(str.strip, selected.split(","))
    if is_selected and name in entry_points(group=_GROUP).names:
        return None
    return f"the plug-in {name} of SGLang is not there: {_MEND}"
