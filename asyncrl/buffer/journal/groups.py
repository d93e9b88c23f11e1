"""Scored groups as bytes: a header in JSON with everything but the columns per token, then these columns.

group id u64 | length of the header u32 | header | prompt's columns | each sample's columns | numbers of 8 bytes
"""

import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from asyncrl.buffer.batches import Dispatch
from asyncrl.buffer.journal.columns import ColumnReader, ColumnWriter
from asyncrl.buffer.journal.json_text import UNSTORABLE, dumps, is_storable, loads, storable
from asyncrl.buffer.journal.records import Finished, Grown
from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import (
    Chunk,
    FinishReason,
    GroupId,
    Prompt,
    Sample,
    ScoredGroup,
    ScoredSample,
    Span,
    Turn,
    Weights,
)

_START = struct.Struct("<QI")
_JOINED_BYTES = 1 << 20
"""Bytes of a group up to which its columns are copied into one piece."""
_USER_VALUES = {"metadata", "reward_parts"}

type NoteFn = Callable[[list[str]], None]
"""Called with the names of values that JSON does not have."""


def has_group_id(body: memoryview) -> bool:
    """Return whether a body is long enough for that of a group; a damaged length may make it shorter."""
    return len(body) >= _START.size


def group_id_of(body: memoryview) -> GroupId:
    """Return the id of the group in the body of a record, without reading more of it."""
    return GroupId(int(_START.unpack_from(body)[0]))


class GroupWriter:
    """The bytes of one group.  ``steps`` must be exhausted before they are read."""

    def __init__(self, finished: Finished, note: NoteFn) -> None:
        self._finished = finished
        self._note = note
        self._columns = ColumnWriter()
        self._doubles: list[float] = []
        self._start = b""

    def steps(self) -> Iterator[None]:
        """Convert the group, and yield between steps of at most some tenths of a millisecond."""
        group, dispatch = self._finished.group, self._finished.dispatch
        prompt = yield from self._prompt(group.prompt)
        samples = []
        for scored in group.samples:
            samples.append((yield from self._sample(scored)))
            yield
        header = {
            "dispatch": [dispatch.order, dispatch.deadline, dispatch.group_id],
            "dispatched": [group.dispatched.version, group.dispatched.step],
            "prompt": prompt,
            "samples": samples,
            "generated": group.num_generated,
        }
        self._columns.doubles(self._doubles)
        text = self._text(_without_defaults(header))  # without a null, ``dumps`` need not look for NaN
        self._start = _START.pack(group.group_id, len(text)) + text

    def buffers(self) -> list[Any]:
        """Return the bytes, in few pieces: each costs the checksum and the write some microseconds."""
        pieces = [self._start, *self._columns.buffers]
        return [b"".join(pieces)] if self._columns.num_bytes < _JOINED_BYTES else pieces

    def _text(self, header: dict[str, Any]) -> bytes:
        try:
            return dumps(header)
        except UNSTORABLE:
            return dumps(self._cleaned(header))

    def _cleaned(self, header: dict[str, Any]) -> dict[str, Any]:
        """Leave out the values of users that JSON does not have."""
        left_out: list[str] = []
        prompt = header["prompt"]
        for part in (prompt, *header["samples"]):
            for name in _USER_VALUES & part.keys():
                part[name], names = storable(part[name])
                left_out += names
        for name in {"label", "messages"} & prompt.keys():
            if not is_storable(prompt[name]):
                del prompt[name]
                left_out.append(name)
        self._note(left_out)
        return header

    def _prompt(self, prompt: Prompt) -> Generator[None, None, dict[str, Any]]:
        yield from self._columns.ids(prompt.token_ids)
        values = {
            "row": prompt.row,
            "epoch": prompt.epoch,
            "text": self._columns.raw(_utf8(prompt.text)),
            "tokens": len(prompt.token_ids),
            "label": prompt.label,
            "metadata": dict(prompt.metadata),
            "messages": None if prompt.messages is None else [dict(each) for each in prompt.messages],
            "variables": dict(prompt.template_variables) or None,
        }
        return _without_defaults(values)

    def _sample(self, scored: ScoredSample) -> Generator[None, None, dict[str, Any]]:
        sample, columns = scored.sample, self._columns
        yield from columns.ids(sample.token_ids)
        columns.floats(sample.logprobs)
        if sample.prompt_ids is not None:
            yield from columns.ids(sample.prompt_ids)
        self._doubles += (scored.reward, sample.seconds)
        values: dict[str, Any] = {
            "index": sample.index,
            "tokens": len(sample.token_ids),
            "text": columns.raw(_utf8(sample.text)),
            "mask": columns.mask(scored.loss_mask),
            "spans": [[span.weights.version, span.weights.step, span.start, span.stop] for span in sample.spans],
            "finish": sample.finish.value,
        }
        if sample.group_id is not None:
            values["group"] = sample.group_id
        if _has_more(scored):
            values |= self._more_of(scored)
        return values

    def _more_of(self, scored: ScoredSample) -> dict[str, Any]:
        """Return the values that few samples have."""
        sample, columns = scored.sample, self._columns
        if scored.outcome is not None:
            self._doubles.append(scored.outcome)
        self._doubles += (turn.reward for turn in sample.turns if turn.reward is not None)
        values = {
            "prompt_tokens": None if sample.prompt_ids is None else len(sample.prompt_ids),
            "turns": [_turn(turn) for turn in sample.turns],
            "resumed_at": sample.resumed_at,
            "rollout": sample.rollout_index,
            "outcome": scored.outcome is not None,
            "metadata": dict(sample.metadata),
            "reward_parts": dict(scored.reward_parts),
            "routes": routes_form(sample.routes, columns),
            "kept": sets_form(sample.kept, columns),
            "top": sets_form(sample.top, columns),
        }
        return _without_defaults(values)


def _has_more(scored: ScoredSample) -> bool:
    """Return whether a sample has values that few have.  One test costs a third of a dict of all."""
    sample = scored.sample
    return bool(
        sample.turns
        or sample.metadata
        or scored.reward_parts
        or sample.resumed_at
        or sample.prompt_ids is not None
        or sample.rollout_index is not None
        or scored.outcome is not None
        or sample.routes is not None
        or sample.kept is not None
        or sample.top is not None
    )


def routes_form(routes: Routes | None, columns: ColumnWriter) -> list[Any] | None:
    """Append routes to the columns and return their form; None for none."""
    return None if routes is None else [columns.numbers(routes.experts_NLK), routes.missing]


def sets_form(sets: TokenSets | None, columns: ColumnWriter) -> list[Any] | None:
    """Append sets of ids to the columns and return their form; None for none."""
    if sets is None:
        return None
    logprobs = () if sets.logprobs_I is None else (sets.logprobs_I,)
    return [columns.numbers(each) for each in (sets.counts_T, sets.ids_I, *logprobs)]


class GrowthWriter:
    """The bytes of an answer's next tokens: group id u64 | length of the header u32 | header | columns."""

    def __init__(self, grown: Grown) -> None:
        self._grown = grown
        self._columns = ColumnWriter()
        self._start = b""

    def steps(self) -> Iterator[None]:
        """Convert the tokens, and yield between steps of at most some tenths of a millisecond."""
        grown, columns = self._grown, self._columns
        chunk = grown.chunk
        yield from columns.ids(chunk.token_ids)
        columns.floats(chunk.logprobs)
        header = {
            "index": grown.index,
            "start": grown.start,
            "weights": [grown.weights.version, grown.weights.step],
            "tokens": len(chunk.token_ids),
            "version": chunk.version,
            "finish": None if grown.finish is None else grown.finish.value,
            "routes": routes_form(chunk.routes, columns),
            "kept": sets_form(chunk.kept, columns),
            "top": sets_form(chunk.top, columns),
        }
        text = dumps(_without_defaults(header))
        self._start = _START.pack(grown.group_id, len(text)) + text

    def buffers(self) -> list[Any]:
        """Return the bytes, in one piece unless they are many."""
        pieces = [self._start, *self._columns.buffers]
        return [b"".join(pieces)] if self._columns.num_bytes < _JOINED_BYTES else pieces


def grown_of(body: memoryview) -> Grown:
    """Return the tokens that ``GrowthWriter`` wrote.  Raises KeyError, TypeError or ValueError for other bytes."""
    group_id, length = _START.unpack_from(body)
    start = _START.size + length
    values = loads(bytes(body[_START.size : start]))
    columns = ColumnReader(body[start:])
    token_ids, logprobs = columns.ids(values["tokens"]), columns.floats(values["tokens"])
    return Grown(
        group_id=GroupId(group_id),
        index=values["index"],
        start=values["start"],
        weights=_weights(*values["weights"]),
        chunk=Chunk(
            token_ids=token_ids,
            logprobs=logprobs,
            version=values["version"],
            **_token_columns(values, columns),
        ),
        finish=None if (finish := values.get("finish")) is None else FinishReason(finish),
    )


def decoded(body: memoryview) -> Finished:
    """Return the group that ``GroupWriter`` wrote.  Raises KeyError, TypeError or ValueError for other bytes."""
    group_id, length = _START.unpack_from(body)
    start = _START.size + length
    header = loads(bytes(body[_START.size : start]))
    columns = ColumnReader(body[start:])
    prompt = _prompt_of(header["prompt"], columns)
    parts = [(values, _columns_of(values, columns)) for values in header["samples"]]
    doubles = iter(columns.doubles(sum(map(_num_doubles, header["samples"]))))
    order, deadline, dispatched_id = header["dispatch"]
    return Finished(
        dispatch=Dispatch(order=order, deadline=deadline, group_id=GroupId(dispatched_id)),
        group=ScoredGroup(
            group_id=GroupId(group_id),
            prompt=prompt,
            dispatched=_weights(*header["dispatched"]),
            samples=tuple(_scored(values, found, doubles) for values, found in parts),
            num_generated=header.get("generated"),
        ),
    )


def _prompt_of(values: Mapping[str, Any], columns: ColumnReader) -> Prompt:
    token_ids = columns.ids(values["tokens"])
    messages = values.get("messages")
    return Prompt(
        row=values["row"],
        epoch=values["epoch"],
        text=_text(columns.raw(values["text"])),
        token_ids=token_ids,
        label=values.get("label"),
        metadata=values.get("metadata", {}),
        messages=None if messages is None else tuple(messages),
        template_variables=values.get("variables", {}),
    )


def _columns_of(values: Mapping[str, Any], columns: ColumnReader) -> dict[str, Any]:
    """Return the columns of a sample, in the order in which ``_sample`` writes them."""
    found: dict[str, Any] = {"token_ids": columns.ids(values["tokens"]), "logprobs": columns.floats(values["tokens"])}
    if (num_prompt := values.get("prompt_tokens")) is not None:
        found["prompt_ids"] = columns.ids(num_prompt)
    found["text"] = _text(columns.raw(values["text"]))
    found["loss_mask"] = columns.mask(values["mask"], values["tokens"])
    return found | _token_columns(values, columns)


def _token_columns(values: Mapping[str, Any], columns: ColumnReader) -> dict[str, Any]:
    """Return routes and sets of ids, as far as there are any."""
    found: dict[str, Any] = {}
    if (routes := values.get("routes")) is not None:
        form, missing = routes
        experts = columns.numbers(form)
        found["routes"] = Routes(experts_NLK=experts, missing=tuple((start, stop) for start, stop in missing))
    for name in ("kept", "top"):
        if (forms := values.get(name)) is not None:
            found[name] = TokenSets(**dict(zip(_SETS, map(columns.numbers, forms), strict=False)))
    return found


def _num_doubles(values: Mapping[str, Any]) -> int:
    return 2 + ("outcome" in values) + sum(bool(has_reward) for *_, has_reward in values.get("turns", ()))


def _scored(values: Mapping[str, Any], found: dict[str, Any], doubles: Iterator[float]) -> ScoredSample:
    loss_mask = found.pop("loss_mask")
    reward, seconds = next(doubles), next(doubles)
    outcome = next(doubles) if "outcome" in values else None
    sample = Sample(
        index=values["index"],
        group_id=values.get("group"),
        spans=tuple(
            Span(weights=_weights(version, step), start=start, stop=stop)
            for version, step, start, stop in values.get("spans", ())
        ),
        turns=tuple(_turn_of(turn, doubles) for turn in values.get("turns", ())),
        finish=FinishReason(values["finish"]),
        seconds=seconds,
        resumed_at=values.get("resumed_at", 0),
        rollout_index=values.get("rollout"),
        metadata=values.get("metadata", {}),
        **found,
    )
    return ScoredSample(
        sample=sample, reward=reward, loss_mask=loss_mask, reward_parts=values.get("reward_parts", {}), outcome=outcome
    )


_SETS = ("counts_T", "ids_I", "logprobs_I")


def _turn(turn: Turn) -> list[Any]:
    return [turn.call, turn.start, turn.stop, turn.finish.value, turn.reward is not None]


def _turn_of(values: Sequence[Any], doubles: Iterator[float]) -> Turn:
    call, start, stop, finish, has_reward = values
    reward = next(doubles) if has_reward else None
    return Turn(call=call, start=start, stop=stop, finish=FinishReason(finish), reward=reward)


def _weights(version: int, step: int) -> Weights:
    return Weights(version=version, step=step)


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _text(data: memoryview) -> str:
    return bytes(data).decode(errors="surrogatepass")


def _without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a reader takes for granted."""
    return {name: value for name, value in values.items() if value is not None and (value or name not in _MAY_LACK)}


_MAY_LACK = {"metadata", "reward_parts", "turns", "resumed_at", "outcome"}
"""Values whose empty form is the default."""
