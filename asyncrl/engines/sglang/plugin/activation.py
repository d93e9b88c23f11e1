"""Which plug-ins are active, for whoever asks: in SGLang's answer to ``/server_info``.  Runs inside SGLang.

    activate of each plug-in ─▶ note ─▶ after_internal_state, in the scheduler ─▶ /server_info ─▶ ``installed``

An SGLang that has none of them answers without the entry.  The notes belong to one process; SGLang activates plug-ins
before it starts any thread.
"""

import pkgutil
from typing import Any

from asyncrl.engines.sglang.labels import PLUGINS

_ANSWER = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"

_notes: dict[str, str | None] = {}
"""By plug-in: None when it is active, else why it is not."""


def note(plugin: str, refusal: str | None = None) -> None:
    """Remember that ``plugin`` is active, or why it is not."""
    _notes[plugin] = refusal


def note_and_answer(plugin: str, refusal: str | None = None) -> None:
    """``note`` and have SGLang answer with the notes, unless its inside is too unlike for that."""
    is_first = not _notes
    note(plugin, refusal)
    if not is_first:
        return
    try:
        pkgutil.resolve_name(_ANSWER)
    except (AttributeError, ImportError):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ANSWER, after_internal_state, HookType.AFTER)


def after_internal_state(result: Any, *asked: Any, **named: Any) -> None:
    """Add the notes to what the scheduler says of itself."""
    state = getattr(result, "internal_state", None)
    if isinstance(state, dict):
        state[PLUGINS] = dict(_notes)
