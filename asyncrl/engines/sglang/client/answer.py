"""One answer as it arrives from SGLang: chunks of one weight version each, and the finish reason.  Uses no HTTP."""

import asyncio
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.engines.sglang.client.calls_in_flight import CallInFlight
from asyncrl.engines.sglang.client.kept_sets import KeptSets, is_needed
from asyncrl.engines.sglang.client.payload import UNREADABLE
from asyncrl.engines.sglang.client.routes import RouteReader
from asyncrl.engines.sglang.client.versions import VersionTrail
from asyncrl.engines.sglang.packed import Entries
from asyncrl.errors import EngineLost, EngineRejected
from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import Chunk, FinishReason, Floats, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The new tokens of an event, and their columns."""

    token_ids: tuple[int, ...]
    logprobs: Floats
    kept: TokenSets | None = None
    top: TokenSets | None = None
    routes: Routes | None = None

    def chunk(self, start: int, stop: int, version: int) -> Chunk:
        if stop - start == len(self.token_ids):
            return Chunk(
                token_ids=self.token_ids,
                logprobs=self.logprobs,
                version=version,
                kept=self.kept,
                top=self.top,
                routes=self.routes,
            )
        return Chunk(
            token_ids=self.token_ids[start:stop],
            logprobs=self.logprobs[start:stop],
            version=version,
            kept=None if self.kept is None else self.kept.part(start, stop),
            top=None if self.top is None else self.top.part(start, stop),
            routes=None if self.routes is None else self._routes_of(self.routes, start, stop),
        )

    def _routes_of(self, routes: Routes, start: int, stop: int) -> Routes:
        """Return the rows that predict a run of tokens; the first run also gets those of the positions before."""
        before = len(routes) - len(self.token_ids)
        return routes.part(before + start if start else 0, before + stop)


class Answer:
    """The part of the answer to ``request`` that has arrived."""

    def __init__(
        self,
        request: Request,
        call: CallInFlight,
        trail: VersionTrail,
        kept_sets: KeptSets,
        route_reader: RouteReader | None,
        on_chunk: Callable[[Chunk], None],
    ) -> None:
        self._request = request
        self._sampling = request.sampling
        self._kept_sets = kept_sets
        self._needs_kept = is_needed(request)
        self._route_reader = route_reader
        self._routes_from = request.routes_from
        self._call = call
        self._trail = trail
        self._on_chunk = on_chunk
        self._clock = asyncio.get_running_loop().time
        self._version = request.weights.version  # assumed for tokens without a stamp: none can be older
        self._num_tokens = 0
        self._text = ""
        self.reason: FinishReason | None = None
        """The finish reason; None until the answer has ended."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Pass the tokens of ``event`` to ``on_chunk``, and note the finish reason.

        Raises EngineLost, also for weights of another run, or EngineRejected.
        """
        _raise_for_error(event)
        try:  # whatever may raise comes before any token is passed
            meta = event["meta_info"]
            reason, stamp = self._reason(meta), _number(meta["weight_version"])
            new = self._aborted(event) if reason is FinishReason.ABORT else _tokens_of(event)
            entries: Entries = meta["output_token_logprobs"]
            runs = self._runs(len(new.token_ids), entries.versions)
            text = _end_of(self._text, self._sampling) + event["text"] if self._sampling.stop else ""
        except UNREADABLE as error:
            raise EngineLost(f"the server sent an event that SGLang never sends: {event!r:.200}") from error
        new, tokens = self._with_routes(self._over_kept(new, entries), entries, reason), new.token_ids
        for version, start, stop in runs:
            self._on_chunk(new.chunk(start, stop, version))
            self._version = max(self._version, version)
        self._num_tokens += len(tokens)
        self._version = max(self._version, self._trail.oldest_possible(stamp, self._clock()))
        self._text = text
        self.reason = (self._own_end(tokens) if reason is FinishReason.ABORT else reason) or self.reason

    def _reason(self, meta: Mapping[str, Any]) -> FinishReason | None:
        finish = meta["finish_reason"]
        if finish is None:
            return None
        asked = self._call.is_interrupted and finish.get("status_code") is None
        if finish["type"] == "abort" and not asked:
            refused = finish.get("status_code") == 400
            raise (EngineRejected if refused else EngineLost)(f"{meta['id']} was aborted: {finish.get('message')}")
        return FinishReason(finish["type"])

    def _over_kept(self, new: _Tokens, entries: Entries) -> _Tokens:
        """Return the tokens with log-probs over the ids that were kept, if their request needs these.

        The log-probs are NaN where the server did not tell the ids.
        """
        num_tokens = len(new.token_ids)
        top = None if entries.top is None else entries.top.part(0, num_tokens)
        if not self._needs_kept or not num_tokens:
            return replace(new, top=top)
        if entries.kept is None:
            self._kept_sets.warn(self._kept_sets.why_missing(self._request))
            return _Tokens(new.token_ids, array("f", [math.nan]) * num_tokens)
        kept, logprobs = entries.kept.sets.part(0, num_tokens), entries.kept.logprobs[:num_tokens]
        if top is not None:  # both policies are over the kept ids then, and so are their likeliest ones
            top = top.within(kept).shifted(np.subtract(logprobs, new.logprobs, dtype=np.float32))
        return _Tokens(new.token_ids, logprobs, kept, top)

    def _with_routes(self, new: _Tokens, entries: Entries, reason: FinishReason | None) -> _Tokens:
        """Return the tokens with the routes of all positions that were not told before.

        Without the plug-in only the last event has routes.
        """
        reader, start, num_tokens = self._route_reader, self._routes_from, len(new.token_ids)
        if reader is None or start is None or not num_tokens:
            return new
        if entries.routes is None:
            if reason is not None and reason is not FinishReason.ABORT:
                reader.warn_of_none()
            return new
        stop = len(self._request.token_ids) + self._num_tokens + num_tokens - 1
        self._routes_from = stop
        return replace(new, routes=reader.read(entries.routes, stop - start))

    def _aborted(self, event: Mapping[str, Any]) -> _Tokens:
        """Return the new tokens of an event that ends an aborted answer.

        SGLang aborts a running request after one more token, which it sends as usual.  For a waiting request it repeats
        the last token with the log-probs of all tokens, possibly after a chunk that was already on its way.
        """
        meta = event["meta_info"]
        new = meta["completion_tokens"] - self._num_tokens
        entries: Entries = meta["output_token_logprobs"]
        return _matched(event["output_ids"][:new], entries.token_ids[:new], entries.logprobs[:new])

    def _runs(self, num_tokens: int, versions: Sequence[tuple[str, int]] | None) -> list[tuple[int, int, int]]:
        """Split ``num_tokens`` into runs of one version, as (version, start, stop)."""
        if versions is None or sum(length for _, length in versions) < num_tokens:  # no plug-in, or a different one
            versions = [(str(self._version), num_tokens)]
        runs, start = [], 0
        for version, length in versions:
            stop = min(start + length, num_tokens)
            if stop > start:
                runs.append((_number(version), start, stop))
            start = stop
        return runs

    def _own_end(self, tokens: tuple[int, ...]) -> FinishReason:
        """Return the finish reason of an aborted answer.

        An answer may reach its own end in the forward pass that aborts it; SGLang then reports only the abort.
        """
        sampling = self._sampling
        if tokens and sampling.ends_at(tokens[-1]):
            return FinishReason.STOP
        if self._num_tokens >= sampling.max_new_tokens:
            return FinishReason.LENGTH
        has_stopped = tokens and any(text in self._text for text in sampling.stop)
        return FinishReason.STOP if has_stopped else FinishReason.ABORT


def _number(label: object) -> int:
    """Return a weight version.  Raises EngineLost for a label that no update of this run gave: ``default``."""
    try:
        return int(str(label))
    except ValueError as error:
        raise EngineLost(f"the server has weights {label!r}, which no update of this run gave") from error


def _end_of(text: str, sampling: SamplingParams) -> str:
    """Return the end of ``text`` that may be the beginning of a stop text."""
    longest = max(map(len, sampling.stop))
    return text[-longest + 1 :] if longest > 1 else ""


def _tokens_of(event: Mapping[str, Any]) -> _Tokens:
    entries: Entries = event["meta_info"]["output_token_logprobs"]
    return _matched(event["output_ids"], entries.token_ids, entries.logprobs)


def _matched(tokens: Sequence[int], scored: Sequence[int], logprobs: Floats) -> _Tokens:
    """Check that tokens and log-probs belong together, because SGLang slices them separately.  Raises EngineLost."""
    if scored is not tokens and scored != tokens:
        raise EngineLost(f"the server sent log-probs of tokens {scored} with tokens {tokens}")
    if len(logprobs) != len(tokens):
        raise EngineLost(f"the server sent {len(logprobs)} log-probs with {len(tokens)} tokens")
    return _Tokens(tuple(tokens), logprobs)


def _raise_for_error(event: Mapping[str, Any]) -> None:
    """Raise EngineRejected or EngineLost for an error that the server sent after the status line."""
    error = event.get("error")
    if error is None:
        return
    refused = isinstance(error, dict) and error.get("code") == 400
    raise (EngineRejected if refused else EngineLost)(f"the server reported an error: {error}")
