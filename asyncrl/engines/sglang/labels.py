"""Names shared by the client and the plug-ins inside SGLang; see ``plugin/token_versions`` and ``plugin/direct``."""

import re
from dataclasses import dataclass

STAMPS = "token_versions"
"""Key in ``meta_info``: for each token of a chunk, the weight version of the forward pass that generated it."""

ROUTES = "routed_experts"
"""SGLang's key in ``meta_info``: experts of each position, in base64; a list of such texts from our plug-in."""

PACKED = "asyncrl/"
"""Prefix of a request id whose answer the plug-in packs (``packed``)."""

DIRECT, DIRECT_CHECKED = "asyncrl_direct", "asyncrl_direct_checked"
"""``load_format`` of an update of all buckets at once, each named by its first tensor (``plugin/direct``)."""

DIRECT_BY_PART, DIRECT_BY_PART_CHECKED = "asyncrl_direct_by_part", "asyncrl_direct_by_part_checked"
"""The same with ``shapes`` that name the expert part of each bucket, or nothing for all ranks (``expert_parts``)."""

RECORDED = "asyncrl: recorded"
"""The plug-in's answer to an update: it can receive the same buckets in one ``DIRECT`` update from now on."""

NOT_REPLAYED = "asyncrl: buckets that are never replayed again: "
"""Text before a JSON list of bucket names in such an answer.

The replay of these buckets does not do all that SGLang's loaders do (``plugin/replay_check``).
"""

EXPERT_PARTS = "asyncrl: expert parts: "
"""Text before JSON in an answer to a ``DIRECT`` update of an engine with expert parallelism.

``num_parts`` is the expert-parallel size.  ``needs`` has a number for each bucket, whose bit p is 1 if part p needs it.
``bytes`` has two numbers for each rank: the bytes that it received, and the bytes that it needs.
"""

STOOD_STILL = "asyncrl: seconds without a forward pass: "
"""Text before a number of seconds in the plug-in's answer to an update.

The seconds count from the end of the engine's last forward pass (``plugin/token_versions``).
"""

PLUGINS = "asyncrl_plugins"
"""Key in a scheduler's state in ``/server_info``: for each plug-in, null or the reason why it is not active."""

SAVES_GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""SGLang's environment variable that makes the memory of CUDA graphs releasable."""

_PREFIX = "weights-"


_ASKED = re.compile(r"(?:;(kept))?(?:;routes=(\d+))?\.")
"""End of a request id, behind its last slash and its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The fields of a request that its id repeats (``plugin/asked_fields``)."""

    returns_kept: bool = False
    routes_from: int | None = None

    def written(self) -> str:
        """Return the end of the request id."""
        routes = "" if self.routes_from is None else f";routes={self.routes_from}"
        return f"{';kept' if self.returns_kept else ''}{routes}."


def asked_in(rid: str) -> Asked | None:
    """Return the fields that a request id names; None if it names none, or is not ours."""
    place = rid.find(";", rid.rfind("/"))
    if place < 0 or not rid.startswith(PACKED) or (found := _ASKED.fullmatch(rid, place)) is None:
        return None
    kept, routes = found.groups()
    return Asked(returns_kept=kept is not None, routes_from=None if routes is None else int(routes))


def cache_key(version: int | str) -> str:
    """Return the ``extra_key`` of a request dispatched under ``version``.

    Only requests with the same key share cached prefixes.
    """
    return f"{_PREFIX}{version}"


def is_cache_key(extra_key: object) -> bool:
    """Whether a request's ``extra_key`` is ours, so that the plug-in may replace it."""
    return isinstance(extra_key, str) and extra_key.startswith(_PREFIX)
