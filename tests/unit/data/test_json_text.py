"""JSON texts of rows: values, and what of them stays exact."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import json_text
from asyncrl.errors import DataError


@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("number", [2**64 - 1, 2**64, 2**64 + 1, -(2**63), -(2**63) - 1, 10**19 - 1, 10**300 + 1])
def test_integers_of_any_size_stay_exact(number: int, as_bytes: bool) -> None:
    text = json.dumps({"label": number, "metadata": {"ids": [number, 1.5, "x"]}})
    found = json_text.loads(text.encode() if as_bytes else text)
    assert found == json.loads(text)
    assert type(found["label"]) is int


WORDS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.recursive(
        st.none() | st.booleans() | NUMBERS | WORDS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
        max_leaves=8,
    )
)
def test_a_value_is_read_as_python_reads_it(value: Any) -> None:
    text = json.dumps(value)
    assert repr(json_text.loads(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["1" * 400, "1" * 5000, '{"a": NaN, "b": 12345678901234567890123}'])
def test_numbers_that_json_does_not_have_are_errors(text: str) -> None:
    with pytest.raises(DataError, match="not JSON"):
        json_text.loads(text)
