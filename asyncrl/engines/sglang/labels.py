"""What the client and the plug-in inside SGLang call things; see ``stamps``."""

STAMPS = "token_versions"
"""Key in ``meta_info``: for each token of a chunk the weight version whose forward pass made it."""

PACKED = "asyncrl/"
"""How the id of a request begins whose answer the plug-in packs (``packed``)."""

_PREFIX = "weights-"


def cache_key(version: int | str) -> str:
    """The ``extra_key`` of a request dispatched under ``version``: it shares cached prefixes only with its like."""
    return f"{_PREFIX}{version}"


def is_cache_key(extra_key: object) -> bool:
    """Whether a request's ``extra_key`` is one of ours, which the plug-in may renew."""
    return isinstance(extra_key, str) and extra_key.startswith(_PREFIX)
