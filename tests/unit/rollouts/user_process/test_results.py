"""The sampling settings of user code, as the controller reads them."""

from typing import Any

import orjson
import pytest

from asyncrl.rollouts.user_process.plain_values import packed, plain, unpacked
from asyncrl.rollouts.user_process.results import sampling_of
from asyncrl.types import SamplingParams

USUAL = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=10)


def read(**extra: Any) -> SamplingParams:
    return sampling_of(unpacked(packed(plain({"extra": extra}, []))), USUAL)


def test_further_settings_can_be_sent_to_an_engine() -> None:
    found = read(logit_bias={5: -100.0, "7": 1.0}, min_p=0.1, custom_params=None)
    assert orjson.dumps(found.extra) == b'{"logit_bias":{"5":-100.0,"7":1.0},"min_p":0.1,"custom_params":null}'


@pytest.mark.parametrize(("value", "shown"), [(b"a+", "b'a+'"), ({"a": [b""]}, "{'a': [b'']}")])
def test_a_setting_that_no_engine_can_get_costs_its_episode(value: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=r"^sampling setting regex cannot be ") as caught:
        read(regex=value)
    assert shown in str(caught.value)
