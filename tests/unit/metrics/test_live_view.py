import errno
import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console

from asyncrl.metrics.facts import GroupCounts, StepFacts, TokenCounts
from asyncrl.metrics.live_view import LineView, LiveView, RunTargets, SafeView, View, open_view
from asyncrl.metrics.reporter import row
from tests.unit.metrics.made import UPDATE, evaluated_set, evaluation, facts, scheduler

PLAN = RunTargets(name="tiny", num_steps=10, max_staleness=1)


def screen(*, terminal: bool, no_color: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, no_color=no_color, color_system="standard")


def shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def last_panel(view: LiveView) -> list[str]:
    paper = Console(file=io.StringIO(), width=80, force_terminal=False)
    paper.print(view)
    return shown(paper)


def take(view: View, step_facts: StepFacts) -> None:
    view.step(row(step_facts, TokenCounts()), step_facts)


def ticking(step_s: float = 1.0) -> Callable[[], float]:
    return itertools.count(0.0, step_s).__next__


def run_through(view: View) -> None:
    view.phase("starting Ray")
    view.phase("SGLang loading")
    for step in range(4):
        evaluated = evaluation(step, held=0.1 * (step + 1)) if step % 2 == 0 else None
        take(view, facts(step, update=UPDATE if step < 3 else None, evaluated=evaluated, trainer_waited_s=2.5))
    view.note("saved step 3")
    view.phase("evaluating")
    view.close()
    view.close()


def test_the_panel_shows_progress_rewards_and_throughput() -> None:
    view = LiveView(screen(terminal=True), PLAN, clock=ticking())
    run_through(view)
    panel = "\n".join(last_panel(view))
    for text in (
        "asyncrl · tiny",
        "step 4/10",
        "0:24 left",  # six steps of four seconds
        "0.625 ± 0.415",
        "0.100 → 0.300  at step 2",
        "250 tokens/s",
        "13 of 16 samples; groups buffered: 3",
        "max 1, mean 0.42, bound 1",
        "no update after this step",
        "taking turns: trainer waited 62 %, engines 12 % of the step",
    ):
        assert text in panel


@pytest.mark.parametrize("no_color", [False, True])
def test_the_live_view_keeps_within_80_columns(no_color: bool) -> None:
    view = LiveView(screen(terminal=True, no_color=no_color), PLAN, clock=ticking())
    run_through(view)
    assert all(len(line) <= 80 for line in last_panel(view))


def test_no_color_means_no_color() -> None:
    console = screen(terminal=True, no_color=True)
    run_through(LiveView(console, PLAN, clock=ticking()))
    assert not [line for line in shown(console) if "\x1b[3" in line]


def test_start_up_phases_stay_with_their_times_and_later_ones_do_not() -> None:
    console = screen(terminal=True, no_color=True)
    run_through(LiveView(console, PLAN, clock=ticking()))
    done = [line for line in shown(console) if "✓" in line]
    assert ["starting Ray" in done[0], "SGLang loading" in done[1], len(done)] == [True, True, 2]


def test_gauges_change_the_panel_in_the_middle_of_a_step() -> None:
    view = LiveView(screen(terminal=True), RunTargets(name="tiny", num_steps=10, max_staleness=1), clock=ticking())
    view.gauges(scheduler())
    assert "13 samples in flight; groups: " in "\n".join(last_panel(view))  # all that there is before the first step
    take(view, facts(0))
    view.gauges(scheduler(TokenCounts()))
    view.close()
    assert "13 of 16 samples" in "\n".join(last_panel(view))


def test_an_outage_is_shown_until_it_is_over() -> None:
    reason = "every call to the reward function has failed for 9 s [/red]"
    away, back = replace(scheduler(), waits_for=reason), scheduler()
    view = LiveView(screen(terminal=True), PLAN, clock=ticking())
    take(view, facts(0))
    view.gauges(away)
    panel = " ".join(" ".join(last_panel(view)).replace("│", " ").split())
    assert f"outage {reason}" in panel
    view.gauges(back)
    assert "outage" not in " ".join(last_panel(view))
    view.close()
    console = screen(terminal=False)
    LineView(console, PLAN, clock=ticking(100.0)).gauges(away)
    assert shown(console)[0].endswith(reason)


def test_a_lag_without_a_bound_is_not_red() -> None:
    console = screen(terminal=True)
    view = LiveView(console, replace(PLAN, max_staleness=None), clock=ticking())
    take(view, facts(0))
    view.close()
    assert "max 1, mean" in "\n".join(last_panel(view))
    assert "no bound" in "\n".join(last_panel(view))
    assert "\x1b[31m" not in "\n".join(shown(console))


def test_a_lag_above_the_bound_is_red() -> None:
    console = screen(terminal=True)
    view = LiveView(console, RunTargets(name="tiny", num_steps=10, max_staleness=0), clock=ticking())
    take(view, facts(0))
    view.close()
    assert any("\x1b[31mmax 1" in line for line in shown(console))


def test_lines_are_plain_aligned_and_fit_80_columns() -> None:
    console = screen(terminal=False)
    run_through(LineView(console, PLAN, clock=ticking()))
    assert shown(console) == [
        "[0:01] starting Ray",
        "[0:03] SGLang loading",
        "   step  reward    tok/s  in flight  ready     lag  pause     left  who waits",
        "   1/10   0.625      250      13/16      3  1/0.42  0.02s     0:36  both 62/12%",
        "held-out reward 0.100",
        "   2/10   0.625      250      13/16      3  1/0.42  0.02s     0:32  both 62/12%",
        "   3/10   0.625      250      13/16      3  1/0.42  0.02s     0:28  both 62/12%",
        "held-out reward 0.100 -> 0.300",
        "   4/10   0.625      250      13/16      3  1/0.42      -     0:24  both 62/12%",
        "saved step 3",
        "[0:13] evaluating",
    ]


def test_a_few_held_out_sets_have_a_line_each_and_many_have_none() -> None:
    for count, expected in ((1, []), (3, ["set0", "set1", "set2"]), (5, [])):
        names = [f"set{number}" for number in range(count)]
        accuracy = dict.fromkeys(names, 0.5)
        report = replace(evaluation(0, **accuracy), sets={name: evaluated_set(0.5) for name in names})
        console = screen(terminal=False)
        take(LineView(console, PLAN, clock=ticking()), facts(0, evaluated=report))
        lines = [line for line in shown(console) if "set" in line]
        assert lines == [f"  {name} 0.500 ± 0.050" for name in expected]
        panel = LiveView(screen(terminal=True), PLAN, clock=ticking())
        take(panel, facts(0, evaluated=report))
        panel.close()
        text = "\n".join(last_panel(panel))
        assert [name for name in names if name in text] == expected
        assert ("0.500 ± 0.050  at step 0" in text) == (count == 1)


def test_lines_report_the_state_after_a_minute_of_silence() -> None:
    console, now = screen(terminal=False), [0.0]
    view = LineView(console, PLAN, clock=lambda: now[0])
    view.phase("generating the first batch")
    held = replace(
        scheduler(TokenCounts(generated=1_234, filtered=1_234)),
        groups=GroupCounts(admitted=9, filtered=5, in_flight=4),
        filter_reasons={"too easy": 2, "too hard": 3},
    )
    for now[0] in (30.0, 60.0, 61.0, 119.0, 120.0):
        view.gauges(held)
    line = "1,234 tokens; 13 samples in flight; groups: 4 in flight, 5 filtered (too hard)"
    assert shown(console) == ["[0:00] generating the first batch", f"[1:00] {line}", f"[2:00] {line}"]


def test_the_header_comes_again_after_twenty_steps() -> None:
    console = screen(terminal=False)
    view = LineView(console, PLAN, clock=ticking())
    for step in range(21):
        take(view, facts(step))
    assert [number for number, line in enumerate(shown(console)) if "who waits" in line] == [0, 21]


def test_auto_is_live_on_a_terminal_only() -> None:
    views = [
        open_view("auto", screen(terminal=True), PLAN),
        open_view("auto", screen(terminal=False), PLAN),
        open_view("lines", screen(terminal=True), PLAN),
        open_view("live", screen(terminal=False), PLAN),
    ]
    for view in views:
        view.close()
    assert [type(view) for view in views] == [LiveView, LineView, LineView, LiveView]


# ---- text of users, and terminals that are gone


@pytest.mark.parametrize("reason", ["kept [mean] outside", "no [/answer] tag", "a\x1b]0;pwned\x07\nb\x1b[2J"])
def test_a_reason_of_a_filter_is_shown_whole_and_controls_nothing(reason: str) -> None:
    view = LiveView(screen(terminal=True), replace(PLAN, name="[/x] \x1b[2J"), clock=ticking())
    lines = LineView(plain := screen(terminal=False), PLAN, clock=ticking(100.0))
    stats = replace(facts(0).scheduler, filter_reasons={reason: 3})
    for each in (view, lines):
        take(each, replace(facts(0), scheduler=stats))
        each.phase(reason)
        each.gauges(stats)
        each.note(reason)
    panel = "\n".join(last_panel(view))
    view.close()
    escaped = reason.replace("\x1b", r"\x1b").replace("\x07", r"\x07").replace("\n", r"\n")
    assert escaped in " ".join(panel.replace("│", " ").split())
    assert escaped in "\n".join(shown(plain))
    assert not {"\x1b", "\x07"} & set(panel + "\n".join(shown(plain)))


class Gone(io.StringIO):
    """A terminal that is gone, or a file on a full disk."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("mode", ["live", "lines"])
def test_a_terminal_that_is_gone_does_not_end_a_run(
    mode: Literal["live", "lines"], caplog: pytest.LogCaptureFixture
) -> None:
    view = SafeView(lambda: open_view(mode, Console(file=Gone(), force_terminal=True, width=80), PLAN))
    run_through(view)
    assert [record.message for record in caplog.records] == [
        "no progress is shown any more: OSError: [Errno 5] Input/output error"
    ]
