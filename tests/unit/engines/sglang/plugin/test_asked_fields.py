"""The fields that the router drops arrive by the request id."""

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engines.sglang.labels import PACKED, Asked, asked_in
from asyncrl.engines.sglang.plugin.asked_fields import before_checks


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("routes_from", [None, 0, 1234])
def test_a_request_gets_the_fields_that_its_id_names(kept: bool, routes_from: int | None) -> None:
    asked = Asked(returns_kept=kept, routes_from=routes_from)
    request: Any = SimpleNamespace(
        rid=f"{PACKED}g1;kept.0/ab-7{asked.written()}",
        return_sampling_mask=False,
        return_routed_experts=False,
        routed_experts_start_len=0,
    )
    before_checks(None, request, "", [1, 2])
    assert request.return_sampling_mask is kept
    assert request.return_routed_experts is (routes_from is not None)
    assert request.routed_experts_start_len == (routes_from or 0)


@pytest.mark.parametrize("rid", ["g1/ab-7;kept.", f"{PACKED}g1/ab-7.", f"{PACKED}g1;kept/ab-7.", f"{PACKED}a/b;x.", ""])
def test_other_ids_name_nothing(rid: str) -> None:
    assert asked_in(rid) is None


def test_a_batch_of_requests_is_left_alone() -> None:
    asked = SimpleNamespace(rid=["a", "b"])
    before_checks(None, asked, "", [])
    assert vars(asked) == {"rid": ["a", "b"]}
