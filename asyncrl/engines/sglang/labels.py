"""What the client and the plug-in inside SGLang call things; see ``stamps`` and ``direct``."""

STAMPS = "token_versions"
"""Key in ``meta_info``: for each token of a chunk the weight version whose forward pass made it."""

PACKED = "asyncrl/"
"""How the id of a request begins whose answer the plug-in packs (``packed``)."""

DIRECT, DIRECT_CHECKED = "asyncrl_direct", "asyncrl_direct_checked"
"""``load_format`` of an update of all buckets at once, each named by its first tensor (``direct``)."""

KEPT = "asyncrl: kept"
"""How the plug-in answers that it can take the same buckets in such an update from now on."""

NOT_REPLAYED = "asyncrl: buckets that are never replayed again: "
"""Before a JSON list of names in such an answer: a replay was not all that SGLang's loaders do (``replay_check``)."""

STOOD_STILL = "asyncrl: seconds without a forward pass: "
"""Before the number with which the plug-in answers an update: since the engine had really paused (``stamps``)."""

PLUGINS = "asyncrl_plugins"
"""Key in what a scheduler says of itself in ``/server_info``: by plug-in, null or why it is not active."""

SAVES_GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""SGLang's environment variable: the memory of CUDA graphs can be given back, too."""

_PREFIX = "weights-"


def cache_key(version: int | str) -> str:
    """The ``extra_key`` of a request dispatched under ``version``: it shares cached prefixes only with its like."""
    return f"{_PREFIX}{version}"


def is_cache_key(extra_key: object) -> bool:
    """Whether a request's ``extra_key`` is one of ours, which the plug-in may renew."""
    return isinstance(extra_key, str) and extra_key.startswith(_PREFIX)
