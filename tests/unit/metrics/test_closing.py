import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from asyncrl.metrics.closing import closing_table
from asyncrl.metrics.history import History
from asyncrl.metrics.live_view import RunTargets
from asyncrl.metrics.reporter import Reporter
from asyncrl.metrics.sinks import JsonlSink
from asyncrl.types import UpdateReport
from tests.unit.metrics.made import TOKENS, UPDATE, evaluated_set, evaluation, facts

PLAN = RunTargets(name="tiny", num_steps=3, max_staleness=1)


def printed(history: History, run_dir: Path, plan: RunTargets = PLAN) -> dict[str, str]:
    """The lines of the table by their labels."""
    console = Console(file=io.StringIO(), width=80)
    console.print(closing_table(history, plan, 75.0, run_dir))
    assert isinstance(console.file, io.StringIO)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert all(len(line) <= 80 for line in lines)
    return {label: text.strip() for label, _, text in (line.partition("  ") for line in lines)}


def three_steps(run_dir: Path) -> History:
    history = History()
    reporter = Reporter([JsonlSink(run_dir), history])
    slow = UpdateReport(pause_s=0.04, total_s=0.3, num_bytes=4096)
    reporter.step(facts(0, update=UPDATE, evaluated=evaluation(0, held=0.125)))
    reporter.step(facts(1, update=None, tokens=replace(TOKENS, generated=1400, trained=1000)))
    tokens = replace(TOKENS, generated=2000, trained=1596, failed=14)
    reporter.step(facts(2, update=slow, tokens=tokens, evaluated=evaluation(3, held=0.5)))
    reporter.close()
    return history


def test_the_closing_table_adds_up_the_run(tmp_path: Path) -> None:
    lines = printed(three_steps(tmp_path), tmp_path)
    assert lines["steps"] == "3 of 3 in 1:15"
    assert lines["held-out reward"] == "0.125 → 0.500  at steps 0 → 3"
    assert lines["reward"] == "0.625 → 0.625"
    assert lines["tokens generated"] == "2,000  167 tokens/s"  # 2000 tokens in 12 s of steps
    assert lines["trained"].split("  ") == ["1,596", " 80 %"]
    assert lines["filtered"].split() == ["200", "10", "%"]
    assert lines["failed"].split() == ["14", "1", "%"]
    assert lines["held"].split() == ["100", "5", "%"]
    assert "lost" not in lines
    assert lines["lag"] == "max 1, bound 1"
    assert lines["weight updates"] == "2, mean pause 0.030 s"
    assert lines["trainer waited"] == "25 % of the time"
    assert lines["engines idle"] == "12 % of the time"
    assert lines["the run was"] == "taking turns"


def test_a_run_that_nothing_keeps_within_the_bound_has_none(tmp_path: Path) -> None:
    """Neither engines without a trainer nor saved batches keep within the bound on staleness."""
    lines = printed(three_steps(tmp_path), tmp_path, replace(PLAN, max_staleness=None))
    assert lines["lag"] == "max 1, no bound"


def test_tokens_that_a_kill_lost_have_a_row(tmp_path: Path) -> None:
    history = History()
    Reporter([history]).step(facts(0, tokens=replace(TOKENS, lost=30)))
    assert printed(history, tmp_path)["lost"] == "30  not counted above; in flight at a kill"


def test_each_held_out_set_has_a_row_with_its_margin_and_its_largest_k(tmp_path: Path) -> None:
    history = History()
    reporter = Reporter([history])
    for step, (one, two) in enumerate([(0.25, 0.5), (0.5, 0.75)]):
        report = replace(
            evaluation(step, aime=one, gsm=two), sets={"aime": evaluated_set(one), "gsm": evaluated_set(two)}
        )
        reporter.step(facts(step, evaluated=report))
    lines = printed(history, tmp_path)
    assert lines["held-out reward"] == "0.375 → 0.625  at steps 0 → 1"
    assert lines["aime"] == "0.250 → 0.500 ± 0.050"
    assert lines["gsm"] == "0.500 → 0.750 ± 0.050"
    assert "pass@4 0.750, majority@4 0.625" in lines


def test_one_held_out_set_needs_no_row_of_its_name(tmp_path: Path) -> None:
    history = History()
    Reporter([history]).step(facts(0, evaluated=replace(evaluation(0, gsm=0.5), sets={"gsm": evaluated_set(0.5)})))
    lines = printed(history, tmp_path)
    assert lines["held-out reward"] == "0.500 ± 0.050  at step 0"
    assert "gsm" not in lines


def test_more_sets_than_fit_are_counted(tmp_path: Path) -> None:
    history, names = History(), [f"set{number}" for number in range(11)]
    report = replace(evaluation(0, **dict.fromkeys(names, 0.5)), sets={name: evaluated_set(0.5) for name in names})
    Reporter([history]).step(facts(0, evaluated=report))
    lines = printed(history, tmp_path)
    assert lines["..."] == "3 more sets in metrics.jsonl"
    assert "set7" in lines
    assert "set8" not in lines


def test_steps_of_the_run_before_count(tmp_path: Path) -> None:
    history = History(steps_before=1)
    reporter = Reporter([history])
    reporter.step(facts(1))
    reporter.step(facts(2))
    assert printed(history, tmp_path)["steps"] == "3 of 3 in 1:15"


def test_it_points_only_to_files_that_exist(tmp_path: Path) -> None:
    lines = printed(three_steps(tmp_path), tmp_path)
    assert "metrics.jsonl" in lines
    assert "timeline.json" not in lines


def test_a_run_that_ended_before_its_first_step_has_a_table_too(tmp_path: Path) -> None:
    lines = printed(History(), tmp_path)
    assert lines["steps"] == "0 of 3 in 1:15"
    assert lines["held-out reward"] == "not measured"
    assert lines["lag"] == "no token trained"
    assert "weight updates" not in lines
