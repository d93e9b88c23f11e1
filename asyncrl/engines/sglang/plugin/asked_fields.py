"""The request fields that sglang-router does not know: a part of the plug-in for token versions.

The router (0.3.2) reads a request into its own type and writes it anew, without the fields that this type lacks.  The
client therefore also writes them into the request id, which the router passes on (``labels.asked_in``):

    client ─▶ router ─▶ ``AskedFields.before_checks``, in the process that serves HTTP ─▶ scheduler

Without the plug-in, only requests that bypass the router have these fields.

Invariant: the hook runs on the event loop of the HTTP server and keeps no state.
"""

import logging
from typing import Any

from asyncrl.engines.sglang.labels import asked_in
from asyncrl.internals import Internal, unlike

_CHECKED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"

INTERNALS = (
    Internal(name=_CHECKED, parameters=("self", "obj", "input_text", "input_ids"), used_in=__name__),
    Internal(
        name="sglang.srt.managers.io_struct.GenerateReqInput",
        attributes=("rid", "return_routed_experts", "return_sampling_mask", "routed_experts_start_len"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)


def activate() -> None:
    """Register the hook, or warn if SGLang's internals differ."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (difference := unlike(INTERNALS)) is not None:
        logger.warning(
            "asyncrl: requests through the router get neither routes of experts nor the ids that top-p kept (%s)",
            difference,
        )
        return
    HookRegistry.register(_CHECKED, before_checks, HookType.BEFORE)


def before_checks(manager: Any, request: Any, *rest: Any, **named: Any) -> None:
    """Set the fields that the request id names."""
    rid = getattr(request, "rid", None)
    asked = asked_in(rid) if isinstance(rid, str) else None
    if asked is None:
        return
    if asked.returns_kept:
        request.return_sampling_mask = True
    if asked.routes_from is not None:
        request.return_routed_experts, request.routed_experts_start_len = True, asked.routes_from
