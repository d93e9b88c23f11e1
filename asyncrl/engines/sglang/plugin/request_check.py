"""The check of requests before they reach the scheduler: a part of the plug-in for token versions.

SGLang 0.5.16 passes some values on unchecked for which the scheduler then raises an exception.  That ends the server
with all its requests, on a CPU as on a GPU.  User functions send their own requests, so the process that serves HTTP
checks these values and answers 400:

    a request ─▶ SGLang's own checks ─▶ ``RequestCheck.after_checks`` ─▶ scheduler

On a CPU, a request without a seed also gets one.  SGLang would draw all such requests with the same seed there, because
the CPU platform turns on per-request seeds (``cpu_platform``): all samples of a group would be equal.

Invariant: the hook runs on the event loop of the HTTP server, once per request, so its state needs no lock.  It must
stay cheap: two passes over the prompt's tokens take 0.2 ms for 10,000 tokens.
"""

import logging
import random
from collections.abc import Iterator
from typing import Any

from asyncrl.internals import Internal, unlike
from asyncrl.types import GRAMMARS

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CHECKED = f"{_MANAGER}._create_tokenized_object"
_INT32, _INT64 = 2**31, 2**63
_FLOAT32 = 3.4e38
"""The largest number that a float32 tensor can hold, rounded down."""

INTERNALS = (
    Internal(name=_CHECKED, parameters=("self", "obj", "input_text", "input_ids"), used_in=__name__),
    Internal(name=_MANAGER, attributes=("model_config", "server_args", "tokenizer"), used_in=__name__),
    Internal(
        name="sglang.srt.managers.io_struct.TokenizedGenerateReqInput",
        attributes=("input_ids", "logprob_start_len", "sampling_params", "top_logprobs_num"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)


def activate() -> None:
    """Register the hook, or warn if SGLang's internals differ."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (difference := unlike(INTERNALS)) is not None:
        logger.warning("asyncrl: a request with an impossible value may end this server (%s)", difference)
        return
    HookRegistry.register(_CHECKED, RequestCheck().after_checks, HookType.AFTER)


class RequestCheck:
    """The hook of the process that serves HTTP."""

    def __init__(self) -> None:
        self._seeds: random.Random | None = None

    def after_checks(self, request: Any, manager: Any, *rest: Any, **named: Any) -> None:
        """Raise ValueError, which SGLang answers with 400, for a request that would end the server."""
        if not hasattr(request, "logprob_start_len"):  # a request for embeddings
            return
        sampling, vocabulary = request.sampling_params, manager.model_config.vocab_size
        for problem in _problems(request, sampling, vocabulary, manager):
            raise ValueError(problem)
        if sampling.sampling_seed is None and manager.server_args.device == "cpu":
            sampling.sampling_seed = self._next_seed(manager.server_args.random_seed)

    def _next_seed(self, run_seed: int) -> int:
        if self._seeds is None:
            self._seeds = random.Random(run_seed)
        return self._seeds.randrange(_INT32)


def _problems(request: Any, sampling: Any, vocabulary: int, manager: Any) -> Iterator[str]:
    """Yield one line for each value that would end the server."""
    yield from _outside("input_ids", request.input_ids, vocabulary)
    yield from _too_large(sampling)
    yield from _no_text(sampling)
    if request.logprob_start_len is not None and request.logprob_start_len < -1:
        yield f"logprob_start_len must be -1 or more, got {request.logprob_start_len}"
    if (request.top_logprobs_num or 0) > vocabulary:
        yield f"top_logprobs_num must be at most {vocabulary}, the vocabulary's size, got {request.top_logprobs_num}"
    if sampling.min_new_tokens > 0:  # SGLang then looks up every token that may end the answer
        if manager.tokenizer.eos_token_id is None:
            yield "min_new_tokens needs a tokenizer with an end token (eos_token)"
        yield from _outside("stop_token_ids", sampling.stop_token_ids, vocabulary)
    server = manager.server_args
    if sampling.min_p > 0 and server.enable_deterministic_inference and server.device != "cpu":
        yield "min_p cannot be used with --enable-deterministic-inference"


def _too_large(sampling: Any) -> Iterator[str]:
    """Yield one line for each number that does not fit into its tensor."""
    if sampling.top_k >= _INT32:
        yield f"top_k must be below {_INT32}, got {sampling.top_k}"
    seed = sampling.sampling_seed
    if seed is not None and not (isinstance(seed, int) and -_INT64 <= seed < _INT64):
        yield f"sampling_seed must be a whole number of 64 bits, got {seed}"
    if sampling.temperature > _FLOAT32:
        yield f"temperature must be a number of 32 bits, got {sampling.temperature}"
    for token, bias in (sampling.logit_bias or {}).items():
        if not -_FLOAT32 <= bias <= _FLOAT32:
            yield f"logit_bias of token {token} must be a number of 32 bits, got {bias}"


def _no_text(sampling: Any) -> Iterator[str]:
    """Yield one line for each grammar that the scheduler fails to look up: one without a hash, or an empty tag."""
    for name in GRAMMARS:
        grammar = getattr(sampling, name)
        if not (grammar is None or isinstance(grammar, str)):
            yield f"{name} must be text, got a {type(grammar).__name__}; JSON text for a schema or tag"
    if sampling.structural_tag == "":
        yield "structural_tag must not be empty"


def _outside(name: str, token_ids: Any, vocabulary: int) -> Iterator[str]:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocabulary):
        wrong = next(token for token in token_ids if not 0 <= token < vocabulary)
        yield f"{name} has token {wrong}, but the model's vocabulary has tokens 0 to {vocabulary - 1}"
