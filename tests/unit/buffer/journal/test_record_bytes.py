import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.buffer.journal.columns import NUMBERS_AT_ONCE, ColumnReader, ColumnWriter
from asyncrl.buffer.journal.json_text import dumps, loads
from asyncrl.buffer.journal.record_bytes import KINDS, RecordWriter, record_of
from asyncrl.buffer.journal.records import (
    Admitted,
    Delivered,
    Evaluated,
    Filtered,
    Finished,
    Grown,
    HeldGroup,
    Left,
    LeftOut,
    PromptPlace,
    Published,
    Record,
    Snapshot,
    Taken,
    Trained,
    Wasted,
)
from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import FinishReason, Turn
from tests.unit.buffer.journal.made import (
    METADATA,
    PLACES,
    VALUES,
    WHOLE_TEXTS,
    bits,
    finished,
    finished_groups,
    grown_answers,
)

COUNTS = st.integers(0, 2**53)
PAIRS = st.none() | st.tuples(COUNTS, COUNTS)
HELD = st.builds(HeldGroup, group_id=COUNTS, place=PLACES, is_buffered=st.booleans())
TAKEN = st.builds(Taken, step=COUNTS, group_ids=st.lists(COUNTS, max_size=4).map(tuple))
RECORDS: dict[type[Record], st.SearchStrategy[Record]] = {
    Snapshot: st.builds(
        Snapshot,
        step=COUNTS,
        state=METADATA,
        held=st.lists(HELD, max_size=3).map(tuple),
        pending=st.lists(TAKEN, max_size=2).map(tuple),
    ),
    Admitted: st.builds(Admitted, group_id=COUNTS, place=PLACES, prompts_taken=COUNTS, last_taken=PAIRS),
    Grown: grown_answers(),
    Finished: finished_groups(),
    Filtered: st.builds(Filtered, group_id=COUNTS, reason=WHOLE_TEXTS, num_tokens=COUNTS, num_observed=COUNTS),
    Left: st.builds(
        Left,
        group_id=COUNTS,
        outcome=st.sampled_from(["stale", "failed"]),
        num_tokens=COUNTS,
        returns_prompt=st.booleans(),
    ),
    LeftOut: st.builds(LeftOut, place=PLACES, prompts_taken=st.none() | COUNTS, last_taken=PAIRS),
    Wasted: st.builds(Wasted, num_tokens=COUNTS),
    Taken: TAKEN,
    Trained: st.builds(Trained, step=COUNTS, is_skipped=st.booleans()),
    Published: st.builds(Published, version=COUNTS, step=COUNTS),
    Evaluated: st.builds(Evaluated, version=COUNTS, step=COUNTS),
    Delivered: st.builds(Delivered, num_tokens=COUNTS),
}


def written(record: Record, left_out: list[str] | None = None) -> bytes:
    writer = RecordWriter(record, (left_out if left_out is not None else []).extend)
    for _ in writer.steps():
        pass
    return b"".join(bytes(each) for each in writer.buffers())


def read_back(record: Record, left_out: list[str] | None = None) -> Record:
    return record_of(KINDS[type(record)], memoryview(written(record, left_out)))


def test_every_record_has_a_strategy() -> None:
    assert set(RECORDS) == set(KINDS)


@pytest.mark.parametrize("kind", list(RECORDS), ids=lambda kind: kind.__name__)
def test_records_come_back_with_every_bit(kind: type[Record]) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(RECORDS[kind])
    def check(record: Record) -> None:
        left_out: list[str] = []
        assert bits(read_back(record, left_out)) == bits(record)
        assert left_out == []

    check()


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_json_keeps_odd_numbers_and_texts(value: Any) -> None:
    assert bits(loads(dumps(value))) == bits(value)


@pytest.mark.parametrize("mask", [(), (1,), (0, 0), (1, 0, 1) * 7, (1, 2, 0), (True, False)])
def test_masks_of_all_forms_come_back(mask: tuple[int, ...]) -> None:
    columns = ColumnWriter()
    form = columns.mask(mask)
    data = b"".join(bytes(memoryview(each)) for each in columns.buffers)
    assert ColumnReader(memoryview(data)).mask(form, len(mask)) == mask


def test_long_columns_are_converted_in_steps() -> None:
    columns, ids = ColumnWriter(), tuple(range(3 * NUMBERS_AT_ONCE))
    assert len(list(columns.ids(ids))) == 3
    data = b"".join(bytes(memoryview(each)) for each in columns.buffers)
    assert ColumnReader(memoryview(data)).ids(len(ids)) == ids


def test_missing_bytes_are_an_error() -> None:
    with pytest.raises(ValueError, match="8 bytes are expected, and 4 are left"):
        ColumnReader(memoryview(bytes(4))).ids(2)


@pytest.mark.parametrize("record", [finished(3), finished(3, tokens=10_000)])
def test_a_long_group_takes_eight_bytes_per_token_and_its_texts(record: Finished) -> None:
    num_tokens = record.group.num_tokens
    assert len(written(record)) < 8 * num_tokens + 700


def cycle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return found


ODD = (print, cycle(), np.array([object()]), {1: 2}, b"bytes", {"deep": [print]})
"""Values that JSON does not have."""


SETS = TokenSets(counts_T=np.array([1, 0, 2], np.int32), ids_I=np.array([4, 5, 6], np.int32))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"group_id": None},
        {"group_id": 7},
        {"prompt_ids": (8, 9)},
        {"resumed_at": 2},
        {"rollout_index": 0},
        {"metadata": {"a": 1}},
        {"turns": (Turn(call=0, start=0, stop=3, finish=FinishReason.STOP, reward=0.5),)},
        {"routes": Routes(experts_NLK=np.array([[[0, 1]]] * 3, np.uint8))},
        {"kept": SETS},
        {"top": SETS},
    ],
)
def test_a_sample_with_one_rare_value_is_read_back(more: dict[str, Any]) -> None:
    record = finished(3)
    first, second = record.group.samples
    samples = (replace(first, sample=replace(first.sample, **more)), second)
    changed = replace(record, group=replace(record.group, samples=samples))
    assert bits(read_back(changed)) == bits(changed)


@pytest.mark.parametrize("more", [{"outcome": 0.0}, {"reward_parts": {"format": 1.0}}])
def test_a_score_with_one_rare_value_is_read_back(more: dict[str, Any]) -> None:
    record = finished(3)
    first, second = record.group.samples
    changed = replace(record, group=replace(record.group, samples=(replace(first, **more), second)))
    assert bits(read_back(changed)) == bits(changed)


def with_metadata(metadata: Any) -> Finished:
    made = finished(3)
    group = made.group
    first, second = group.samples
    sample = replace(first.sample, metadata=metadata)
    prompt = replace(group.prompt, metadata=metadata)
    samples = (replace(first, sample=sample, reward_parts=metadata), second)
    return replace(made, group=replace(group, prompt=prompt, samples=samples))


@pytest.mark.parametrize("value", ODD)
def test_values_that_json_does_not_have_are_left_out_by_name(value: Any) -> None:
    left_out: list[str] = []
    kept = {"fine": [1, math.nan], "none": None}
    back = read_back(with_metadata({"odd": value, **kept}), left_out)
    assert bits(back) == bits(with_metadata(kept))
    assert set(left_out) == {"odd"}


def test_a_key_that_is_no_text_is_left_out() -> None:
    left_out: list[str] = []
    assert bits(read_back(with_metadata({7: "x", "a": 1}), left_out)) == bits(with_metadata({"a": 1}))
    assert set(left_out) == {"7"}


def test_numpy_becomes_what_json_has() -> None:
    back = read_back(with_metadata({"a": np.arange(3), "b": np.float32(0.5), "c": np.array([math.nan]), "d": (1, 2)}))
    expected = {"a": [0, 1, 2], "b": 0.5, "c": [math.nan], "d": [1, 2]}
    assert bits(back) == bits(with_metadata(expected))


def test_a_label_that_json_does_not_have_is_left_out() -> None:
    left_out: list[str] = []
    made = finished(3)
    odd: Any = {"when": b"now"}
    prompt = replace(made.group.prompt, label=odd, messages=({"content": b"x"},))
    back = read_back(replace(made, group=replace(made.group, prompt=prompt)), left_out)
    assert bits(back) == bits(
        replace(made, group=replace(made.group, prompt=replace(prompt, label=None, messages=None)))
    )
    assert set(left_out) == {"label", "messages"}


def test_a_prompt_of_a_place_is_cleaned_too() -> None:
    left_out: list[str] = []
    prompt = replace(finished(3).group.prompt, metadata={"odd": print, "a": 1}, label={1: 2})  # type: ignore[dict-item]
    held = HeldGroup(group_id=3, place=PromptPlace(epoch=0, row=3, prompt=prompt), is_buffered=False)  # type: ignore[arg-type]
    back = read_back(Snapshot(step=1, state={}, held=(held,)), left_out)
    assert isinstance(back, Snapshot)
    assert back.held[0].place.prompt == replace(prompt, metadata={"a": 1}, label=None)
    assert set(left_out) == {"odd", "label"}


def test_arrays_that_come_back_may_be_written_to() -> None:
    """With others, torch warns."""
    columns = ColumnWriter()
    form = columns.numbers(np.arange(6, dtype=np.uint16).reshape(2, 3))
    back = ColumnReader(memoryview(b"".join(bytes(memoryview(each)) for each in columns.buffers))).numbers(form)
    assert back.flags.writeable
    assert back.tolist() == [[0, 1, 2], [3, 4, 5]]
