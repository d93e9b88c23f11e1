"""The flags that are passed through to the SGLang server (``--sglang-*``) and to its router (``--router-*``)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from asyncrl.config.areas import FlagWords, RunConfig
from asyncrl.config.areas.ranges import must, refuse
from asyncrl.config.knobs import PASSED_THROUGH, knobs, nearest
from asyncrl.config.values import WrongValue, is_utf8, shown

_LAUNCHER = "asyncrl sets it when it starts the servers"
_CLUSTER = "an engine runs on one node; use --rollout-num-gpus and --rollout-num-gpus-per-engine"
_REPLICAS = ("dp-size", "data-parallel-size")
_TENSOR_PARALLEL = "use --rollout-num-gpus-per-engine"

_ONE_KEY = "a run has one key for engines and router; --sglang-api-key chooses it"
_BESIDE_THE_KEY = "SGLang does not ask for the run's key there; leave it out"

_PD = "every engine does prefill and decode; leave it out"

API_KEY = "api-key"
"""The SGLang flag with the key of the run, which asyncrl hands to engines and router outside the command line."""

OWNED = {
    "sglang-": {
        "model-path": "use --hf-checkpoint",
        "model": "use --hf-checkpoint",
        "tokenizer-path": "use --hf-checkpoint",
        "tp-size": _TENSOR_PARALLEL,
        "tensor-parallel-size": _TENSOR_PARALLEL,
        "tp": _TENSOR_PARALLEL,
        "pp-size": _TENSOR_PARALLEL,
        "pipeline-parallel-size": _TENSOR_PARALLEL,
        "device": "use --device",
        "dtype": "use --dtype",
        "random-seed": "use --seed",
        "nnodes": _CLUSTER,
        "node-rank": _CLUSTER,
        "dist-init-addr": _CLUSTER,
        "base-gpu-id": _CLUSTER,
        "gpu-id-step": _CLUSTER,
        "host": _LAUNCHER,
        "port": _LAUNCHER,
        "nccl-port": _LAUNCHER,
        "config": "give each server flag as --sglang-FLAG",
        "admin-api-key": _ONE_KEY,
        "tokenizer-worker-num": "SGLang takes no key with several of these processes; leave it out",
        "grpc-port": _BESIDE_THE_KEY,
        "grpc-mode": _BESIDE_THE_KEY,
        "smg-grpc-mode": _BESIDE_THE_KEY,
        "weight-version": "asyncrl sets it with each weight update",
        "enable-ep-moe": "SGLang has replaced it; use --sglang-ep-size with the number of GPUs per engine",
        "enable-deepep-moe": "SGLang has replaced it; use --sglang-moe-a2a-backend deepep",
        "incremental-streaming-output": "asyncrl always turns it on",
        "router-ip": "asyncrl starts the router; --no-use-router does without it",
        "router-port": "asyncrl starts the router; --no-use-router does without it",
        "router-request-timeout-secs": "use --request-timeout-s, the time without a token",
        "router-policy": "use --router-policy",
        "disaggregation-mode": _PD,
        "disaggregation-transfer-backend": _PD,
        "disaggregation-ib-device": _PD,
        "disaggregation-bootstrap-port": _PD,
        "disaggregation-decode-enable-radix-cache": _PD,
        "disaggregation-decode-enable-offload-kvcache": _PD,
        "disaggregation-decode-extra-slots": _PD,
        "disaggregation-decode-polling-interval": _PD,
        "num-reserved-decode-tokens": _PD,
    },
    "router-": {
        "worker-urls": _LAUNCHER,
        "host": _LAUNCHER,
        "port": _LAUNCHER,
        "api-key": _ONE_KEY,
        "control-plane-api-keys": _ONE_KEY,
        "jwt-issuer": _ONE_KEY,
        "jwt-audience": _ONE_KEY,
        "pd-disaggregation": _PD,
        "prefill": _PD,
        "decode": _PD,
        "prefill-policy": _PD,
        "decode-policy": _PD,
        "prefill-selector": _PD,
        "decode-selector": _PD,
        "mini-lb": _PD,
    },
}
"""The flags that asyncrl sets itself or that the program has replaced, by prefix, each with its reason or
replacement."""


def passed_through(name: str) -> tuple[str, str] | None:
    """The prefix and bare name of another program's flag, or None for any other name."""
    if name in knobs():
        return None
    return next(((prefix, name.removeprefix(prefix)) for prefix in PASSED_THROUGH if name.startswith(prefix)), None)


def given_words(flags: dict[str, FlagWords], name: str, words: Sequence[str]) -> None:
    """Add a flag that ``words`` follow.  The word true stands for a flag without a value.

    The word false stands for a flag that is not given.  It is kept until all sources are joined, because it replaces
    what another source gives.
    """
    if len(words) > 1:
        flags[name] = tuple(words)
    elif not words or words[0].lower() == "true":
        flags[name] = True
    elif words[0].lower() == "false":
        flags[name] = False
    else:
        flags[name] = words[0]


def without_false(flags: Mapping[str, FlagWords]) -> dict[str, FlagWords]:
    """The flags of another program that are given."""
    return {name: words for name, words in flags.items() if words is not False}


def flag_words(given: Any) -> list[str]:
    """Convert a TOML value to the words of a command line."""
    if isinstance(given, list):
        return [word for item in given for word in flag_words(item)]
    if isinstance(given, bool):
        return ["true" if given else "false"]
    if isinstance(given, str) and not is_utf8(given):
        raise WrongValue(f"must be UTF-8 text, got {given!a}")
    if isinstance(given, str | int | float):
        return [str(given)]
    raise WrongValue(f"must be text, a number, true, or a list of these, got {shown(given)}")


def owned(sglang: Collection[str], router: Collection[str]) -> list[str]:
    """One line for each given flag in ``OWNED``, and for replicas of an engine."""
    given = {"sglang-": sglang, "router-": router}
    replicas = [] if "enable-dp-attention" in sglang else [name for name in _REPLICAS if name in sglang]
    return [
        f"--{prefix}{name} cannot be given: {OWNED[prefix][name]}"
        for prefix, names in given.items()
        for name in names
        if name in OWNED[prefix]
    ] + [f"--sglang-{name} without --sglang-enable-dp-attention: {_CLUSTER}" for name in replicas]


def api_key_problems(run: RunConfig) -> list[str]:
    """One line, without the key, if ``--sglang-api-key`` cannot be sent as a bearer token."""
    key = run.sglang.get(API_KEY, "")
    is_word = isinstance(key, str) and key.isascii() and key.isprintable() and " " not in key
    return must(
        is_word, "--sglang-api-key must be one word of printable ASCII characters; leave it out for a random key"
    )


def check_passthrough(run: RunConfig, server_flags: Collection[str], router_flags: Collection[str]) -> None:
    """Raise ConfigError if the installed server or router lacks a flag of the run.

    Known names have dashes, but no leading ``--``.
    """
    refuse(
        _unknown("sglang-", run.sglang, server_flags, "SGLang server")
        + _unknown("router-", run.router, router_flags, "router")
    )


def _unknown(prefix: str, given: Mapping[str, Any], known: Collection[str], owner: str) -> list[str]:
    ours = {name.removeprefix(prefix) for name in knobs() if name.startswith(prefix)}
    lines = []
    for name in given:
        guess = nearest(name, {*known, *ours})
        hint = f"; did you mean --{prefix}{guess}?" if guess else f"; the installed {owner} has no such flag"
        lines += must(name in known, f"unknown flag --{prefix}{name}{hint}")
    return lines
