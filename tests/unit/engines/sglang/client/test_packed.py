"""Packed events carry the content of SGLang's own events bit for bit.

The tests of the engine check the same with a real server.
"""

from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.sglang.client.payload import read_event
from asyncrl.engines.sglang.labels import PACKED, STAMPS
from asyncrl.engines.sglang.packed import MASK, MASK_LOGPROBS, pack, runs_of
from asyncrl.engines.sglang.plugin.token_versions import PackedEvents

TOKENS = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0.0, width=32, allow_nan=False, allow_infinity=False)),
    min_size=1,
)


def event(tokens: list[tuple[int, float]], stamps: list[str | None] | None, rid: str = f"{PACKED}g1.0/a.") -> Any:
    meta = {
        "id": rid,
        "finish_reason": None,
        "weight_version": "3",
        "input_token_logprobs": [],
        "output_token_logprobs": [(logprob, token, None) for token, logprob in tokens],
        **({} if stamps is None else {STAMPS: stamps}),
    }
    return {"text": "some", "output_ids": [token for token, _ in tokens], "meta_info": meta}


@given(tokens=TOKENS, splits=st.lists(st.integers(1, 9), max_size=4))
def test_answers_survive_packing(tokens: list[tuple[int, float]], splits: list[int]) -> None:
    stamps = [str(version) for version, length in enumerate([*splits, len(tokens)]) for _ in range(length)]
    plain = event(tokens, [*stamps[: len(tokens)]])
    packed = pack(plain)
    assert packed is not None
    ours, theirs = read_event(orjson.dumps(packed)), read_event(orjson.dumps(plain))
    entries, expected = (each["meta_info"].pop("output_token_logprobs") for each in (ours, theirs))
    assert list(entries.token_ids) == list(ours.pop("output_ids")) == theirs.pop("output_ids") == expected.token_ids
    sent = array("f", [logprob for _, logprob in tokens])
    assert entries.logprobs.tobytes() == expected.logprobs.tobytes() == sent.tobytes()
    assert list(map(tuple, entries.versions)) == expected.versions
    assert ours == {**theirs, "meta_info": {k: v for k, v in theirs["meta_info"].items() if k[:5] != "input"}}


def test_answers_are_packed_only_on_request() -> None:
    assert pack(event([(5, -1.0)], None, rid="somebody else's")) is None
    assert pack({"error": {"message": "no"}}) is None
    assert pack(event([], None)) is None


def test_tokens_and_logprobs_that_do_not_belong_together_are_left_for_the_client_to_refuse() -> None:
    broken = event([(5, -1.0), (6, -2.0)], None)
    broken["output_ids"] = [5]
    assert pack(broken) is None


@pytest.mark.parametrize(
    ("stamps", "runs"),
    [
        (["1", "1"], [("1", 2)]),
        (["1", "2", "2"], [("1", 1), ("2", 2)]),
        (["1", None], None),
        ([None, None], None),
        ([], []),
    ],
)
def test_equal_stamps_are_one_run(stamps: list[str | None], runs: list[tuple[str, int]] | None) -> None:
    assert runs_of(stamps) == runs


def test_an_unexpected_sglang_disables_packing_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    hook, unlike = PackedEvents(), event([(5, -1.0)], None)
    assert hook.before_writing(event([(5, -1.0)], None)) is not None
    unlike["meta_info"]["output_token_logprobs"] = [(-1.0,)]
    assert hook.before_writing(unlike) is None
    assert hook.before_writing(event([(5, -1.0)], None)) is None
    assert len(caplog.records) == 1


@given(tokens=TOKENS, sets=st.lists(st.lists(st.integers(0, 2**31 - 1)), min_size=1))
def test_kept_sets_survive_packing(tokens: list[tuple[int, float]], sets: list[list[int]]) -> None:
    plain = event(tokens, None)
    kept = [[token, *sets[place % len(sets)]] for place, (token, _) in enumerate(tokens)]
    plain["meta_info"] |= {MASK: kept, MASK_LOGPROBS: [logprob / 2 for _, logprob in tokens]}
    packed = pack(plain)
    assert packed is not None
    ours, theirs = (read_event(orjson.dumps(each))["meta_info"]["output_token_logprobs"] for each in (packed, plain))
    assert ours.kept.sets == theirs.kept.sets
    assert ours.kept.logprobs.tobytes() == theirs.kept.logprobs.tobytes()
    assert [theirs.kept.sets.part(place, place + 1).ids_I.tolist() for place in range(len(tokens))] == kept
