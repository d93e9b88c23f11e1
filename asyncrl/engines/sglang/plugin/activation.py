"""The report of active plug-ins in SGLang's answer to ``/server_info``.  Runs inside SGLang.

    activate of each plug-in ─▶ note ─▶ after_internal_state, in the scheduler ─▶ /server_info ─▶ ``installed_plugins``

An SGLang without our plug-ins answers without the entry.
"""

import logging
from typing import Any

from asyncrl.engines.sglang.labels import PLUGINS
from asyncrl.internals import Internal, unlike

_ANSWER = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"

INTERNALS = (Internal(name=_ANSWER, parameters=("self", "recv_req"), used_in=__name__),)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)

# Invariant: one process's own.  Plug-ins write it before SGLang starts a thread, and hooks on the scheduler's thread,
# which also reads it: no lock is needed.
_notes: dict[str, str | None] = {}
"""None for each active plug-in, otherwise the reason why it is not active."""


def note(plugin: str, refusal: str | None = None) -> None:
    """Remember that ``plugin`` is active, or why it is not."""
    _notes[plugin] = refusal


def note_and_answer(plugin: str, refusal: str | None = None) -> None:
    """Call ``note``, and hook SGLang's answer so that it has the notes.

    Without effect on the answer, but for a warning, if this SGLang has no such function to hook: the run then reports
    that the plug-ins are missing.
    """
    is_first = not _notes
    note(plugin, refusal)
    if not is_first:
        return
    if (difference := unlike(INTERNALS)) is not None:
        logger.warning("asyncrl: the run will not be told which plug-ins this SGLang has (%s)", difference)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ANSWER, after_internal_state, HookType.AFTER)


def after_internal_state(result: Any, *asked: Any, **named: Any) -> None:
    """Add the notes to the state that the scheduler reports."""
    state = getattr(result, "internal_state", None)
    if isinstance(state, dict):
        state[PLUGINS] = dict(_notes)
