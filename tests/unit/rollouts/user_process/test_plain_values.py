"""Values that leave a process of user code keep their content, and nothing else comes with them."""

import enum
import pickle
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollouts.user_process.plain_values import packed, plain, unpacked
from asyncrl.rollouts.user_process.wire import PIECE_BYTES


class Color(enum.Enum):
    RED = "red"


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit",))


def travelled(value: Any) -> tuple[Any, list[str]]:
    left_out: list[str] = []
    return unpacked(packed(plain(value, left_out))), left_out


@pytest.mark.parametrize(
    ("value", "arrived"),
    [
        ((1, "a", None, True, 2.5, b"x"), [1, "a", None, True, 2.5, b"x"]),
        ({"a": {3}, 4: [array("f", [0.5])]}, {"a": [3], 4: [[0.5]]}),
        (Color.RED, "red"),
        (Path("a/b"), "a/b"),
        ([np.int64(3), np.float32(0.5), np.arange(3), np.float64(2.0)], [3, 0.5, [0, 1, 2], 2.0]),
        (list(range(1000)), list(range(1000))),
        ([-0.5] * 100, [-0.5] * 100),
        ([True] * 100, [True] * 100),
        ("lone \ud800 surrogate", "lone ? surrogate"),
    ],
)
def test_plain_types_arrive(value: Any, arrived: Any) -> None:
    assert travelled(value) == (arrived, [])


def test_anything_else_is_left_out_and_named() -> None:
    own: list[Any] = []
    own.append(own)
    found, left_out = travelled({"kept": 1, "lock": Hostile(), "list": [1, Hostile()], "big": 2**70, (1, 2): 3})
    assert found == {"kept": 1, "list": [1, None]}
    assert left_out == ["lock (Hostile)", "list[1] (Hostile)", "big (more than 64 bits)", "(1, 2) (the key is a tuple)"]
    assert "nested too deeply" in travelled(own)[1][0]


def test_pickles_are_only_bytes() -> None:
    data = pickle.dumps(Hostile())
    assert travelled({"data": data}) == ({"data": data}, [])


@pytest.mark.parametrize(
    "value",
    [
        "x" * 300_000,
        b"x" * 300_000,
        list(range(100_000)),
        [0.25] * 100_000,
        [{"text": "y" * 100, "n": each} for each in range(3000)],
        {"a": {str(each): each for each in range(30_000)}, "b": [["z" * 200_000]], "c": {"only": "w" * 100_000}},
    ],
    ids=["text", "bytes", "ints", "floats", "dicts", "nested"],
)
def test_large_values_travel_in_small_pieces(value: Any) -> None:
    pieces = packed(plain(value, []))
    assert len(pieces) > 1
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert unpacked(pieces) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text("abé🙂"),
    lambda inner: st.lists(inner, max_size=80) | st.dictionaries(st.text("ab"), inner),
    max_leaves=200,
)


@given(JSON)
def test_json_values_are_the_same_after_the_way(value: Any) -> None:
    assert travelled(value) == (value, [])


@pytest.mark.parametrize("piece", [b"v\xc1", b"?x", b"", b"v\x92\x01"])
def test_bytes_that_are_no_message_raise(piece: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        unpacked([piece, b"v\x01", b"v\xa1a"])
