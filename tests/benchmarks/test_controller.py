"""The benchmark of the controller runs, counts every token, and reports a broken limit."""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.sglang.client.events import EventReader
from asyncrl.engines.sglang.client.payload import read_event
from asyncrl.engines.sglang.client.response import ResponseReader
from benchmarks.controller import __main__ as controller
from benchmarks.controller.answering_server import payloads, sizes, stamped, tokens_of_answer
from benchmarks.controller.case import Case, CaseMeasurement
from benchmarks.controller.meters import percentiles_ms

SMALL = Case(num_tokens=40, in_flight=16, interval=16, tokens_per_s=4000, warmup_s=0.5, measured_s=2.0, num_servers=1)
MEASURED = CaseMeasurement(
    samples=1000.0,
    seconds=1.0,
    cpu_s=0.4,
    starved_s=0.0,
    lag_p50_ms=1.0,
    lag_p99_ms=10.0,
    lag_max_ms=30.0,
    gc_s=0.0,
    gc_max_ms=0.0,
    peak_mib=100.0,
    in_flight=1024,
    lost=0,
    shares={},
)


def test_the_whole_pipeline_takes_what_the_servers_write() -> None:
    measured = controller.run(SMALL, controller.ROOT)
    assert 0 <= measured.in_flight <= SMALL.in_flight  # at one moment: on a busy machine, all may just have ended
    assert 10 < measured.samples / measured.seconds < 300  # 100 on idle processors
    assert 0 < measured.cpu_s < measured.seconds
    assert measured.lost == 0  # no sample grows too old to be trained, because the servers get the published versions


def test_the_profile_accounts_for_all_of_the_time() -> None:
    measured = controller.run(replace(SMALL, is_profiled=True), controller.ROOT)
    assert sum(measured.shares.values()) == pytest.approx(1.0)
    assert {"json", "http", "draft", "scheduler"} <= set(measured.shares)


@pytest.mark.parametrize("is_plain", [True, False])
def test_the_events_of_an_answer_carry_its_tokens_and_say_that_it_ended(is_plain: bool) -> None:
    pieces = [stamped(payload, "12") for payload in payloads(100, 16, is_plain=is_plain)]
    response = ResponseReader()
    wire = b"".join(response.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(pieces)))
    found = [read_event(payload) for payload in EventReader().feed(wire)]
    stamps = [tuple(run) for event in found for run in event["meta_info"]["output_token_logprobs"].versions]
    assert stamps == [("12", size) for size in sizes(100, 16)]
    assert [len(event["output_ids"]) for event in found] == sizes(100, 16) == [1, *[16] * 6, 3]
    assert [token for event in found for token in event["output_ids"]] == tokens_of_answer(100)
    assert Counter(event["meta_info"]["finish_reason"] is None for event in found) == {True: 7, False: 1}


def test_one_long_block_counts_for_all_that_was_due_meanwhile() -> None:
    on_time, blocked = [0.0] * 99, [1.0]
    p50, p99, most = percentiles_ms([*on_time, *blocked], period_s=0.01)
    assert p50 == pytest.approx(10.0, abs=10.0)
    assert p99 == pytest.approx(980.0, abs=20.0)
    assert most == 1000.0


def row(**measured: Any) -> dict[str, Any]:
    """One row of results: the case that is checked, at the pace it asks for."""
    case = replace(SMALL, **controller.CHECKED)
    return {
        "tree": controller.ROOT.name,
        "case": asdict(case),
        "measured": [asdict(replace(MEASURED, **measured))],
    }


@pytest.mark.parametrize(
    ("cpu_s", "lag_ms", "samples", "num_problems"),
    [(0.4, 10.0, 1000, 0), (0.6, 10.0, 1000, 1), (0.4, 21.0, 1000, 1), (0.6, 21.0, 1000, 2), (0.2, 10.0, 900, 1)],
)
def test_the_check_fails_when_a_limit_is_broken(cpu_s: float, lag_ms: float, samples: float, num_problems: int) -> None:
    problems = controller.too_much([row(cpu_s=cpu_s, lag_p99_ms=lag_ms, samples=samples)])
    assert len(problems) == num_problems


def test_two_runs_that_each_break_a_limit_do_not_pass_together() -> None:
    cheap_but_late, dear_but_early = row(cpu_s=0.4, lag_p99_ms=30.0), row(cpu_s=0.6, lag_p99_ms=5.0)
    both = {**cheap_but_late, "measured": cheap_but_late["measured"] + dear_but_early["measured"]}
    assert controller.too_much([both]) != []
    assert controller.too_much([cheap_but_late, dear_but_early]) != []


@pytest.mark.parametrize("words", [["--check"], ["--check", "--tokens", "1000", "--tokens-per-s", "1e6"]])
def test_the_check_has_its_case_once_whatever_else_is_measured(words: list[str]) -> None:
    asked = controller._parser().parse_args(words)  # noqa: SLF001
    measured = [asdict(case) for case in (*controller.cases(asked), *controller.checked(asked))]
    assert sum(controller.CHECKED.items() <= case.items() for case in measured) == 1


def test_the_check_fails_without_the_case_it_is_about() -> None:
    assert controller.too_much([]) != []


def test_a_checkout_without_the_case_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        controller.main(["--against", str(tmp_path)])
    assert ended.value.code == 2
    assert f"--against {tmp_path}: no benchmarks/controller/case.py there" in capsys.readouterr().err
