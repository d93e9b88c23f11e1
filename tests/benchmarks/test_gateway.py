"""The benchmark of the gateway runs, and reports a broken limit."""

from dataclasses import asdict, replace

import pytest

from benchmarks.gateway import __main__ as gateway
from benchmarks.gateway.case import Case, GatewayMeasurement

SMALL = Case(api="chat", in_flight=8, num_turns=3, num_tokens=20, turns_per_s=100.0, warmup_s=2.5, measured_s=1.0)
MEASURED = GatewayMeasurement(
    turns=1000,
    seconds=1.0,
    cpu_s=0.4,
    starved_s=0.0,
    lag_p50_ms=1.0,
    lag_p99_ms=2.0,
    lag_max_ms=3.0,
    num_context=100.0,
    branches=0,
)


@pytest.mark.parametrize("api", gateway.APIS)
def test_clients_of_each_api_chat_without_branches(api: str) -> None:
    measured = gateway.run(replace(SMALL, api=api))
    assert 20 < measured.turns < 200  # 100 on idle processors
    assert measured.branches == 0
    assert measured.num_context > 40  # more than a prompt


def test_limits_are_checked() -> None:
    def problems(**changes: float) -> list[str]:
        return gateway.too_much([{"case": asdict(SMALL), "measured": asdict(replace(MEASURED, **changes))}])  # type: ignore[arg-type]

    assert problems() == []
    assert problems(cpu_s=1.1) == ["chat: 1.100 ms of CPU time per turn, the limit is 1"]
    slow = {"case": asdict(SMALL), "measured": asdict(replace(MEASURED, cpu_s=1.1))}
    fast = {"case": asdict(replace(SMALL, turns_per_s=200.0)), "measured": asdict(MEASURED)}
    assert gateway.too_much([slow, fast]) == []
    assert problems(branches=2) == ["chat: 2 branches, although no client edits its history"]
    assert problems(turns=0, cpu_s=0.0) == ["chat: no turns"]
