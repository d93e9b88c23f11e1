"""The bookkeeping of a campaign of faults, and one real life."""

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from benchmarks.chaos import disks, holds, lives
from benchmarks.chaos.__main__ import Share, main
from benchmarks.chaos.accounts import (
    DOCUMENTED,
    TO_THE_END,
    Attempt,
    Figures,
    Told,
    figures,
    summary,
    table,
    verdict,
)
from benchmarks.chaos.faults import all_faults, life, named
from benchmarks.common.endless_run import GROUP_FATES, TOKEN_FATES

BATCH = 4
SHORT = 12
"""Steps of a life whose fault is drawn for the fourth one."""


def row(step: int, *, stale: int = 0, lost: int = 0) -> dict[str, Any]:
    """A row of metrics that adds up."""
    done = step + 1
    return (
        {f"tokens/{fate}": 0 for fate in TOKEN_FATES}
        | {f"groups/{fate}": 0 for fate in GROUP_FATES}
        | {"step": step, "tokens/trained": 100 * done, "tokens/stale": stale, "tokens/held": 30, "tokens/lost": lost}
        | {"tokens/generated": 100 * done + stale + 30, "groups/trained": BATCH * done, "groups/in_flight": 2}
        | {"groups/admitted": BATCH * done + 2}
    )


def attempt(steps: range, code: int | None = 0, **changes: Any) -> Attempt:
    """An attempt that trained ``steps``, each on the next prompts."""
    told: dict[str, Any] = {
        "code": code,
        "said": "",
        "has_traceback": False,
        "rows": tuple(row(step) for step in steps),
        "trained": {step: tuple((0, BATCH * step + place) for place in range(BATCH)) for step in steps},
    }
    return Attempt(**(told | changes))


def state(steps: int, **changes: int) -> dict[str, Any]:
    """The state in the last checkpoint after ``steps`` steps, with two prompts outstanding."""
    groups = dict.fromkeys(GROUP_FATES, 0) | {"trained": BATCH * steps, "admitted": BATCH * steps}
    tokens = dict.fromkeys(TOKEN_FATES, 0) | {"trained": 100 * steps, "generated": 100 * steps}
    taken = {"prompts_taken": BATCH * steps + 2, "outstanding": [[0, 98], [0, 99]]}
    return {"groups": groups, "tokens": tokens, **taken, **changes}


def judged(*attempts: Attempt, **changes: int) -> tuple[Figures, str]:
    found = figures(attempts, state(8, **changes))
    return found, verdict(attempts, found, num_steps=8, may_fail=False)


def test_a_run_without_a_fault_has_lost_nothing() -> None:
    found, end = judged(attempt(range(8)))
    lost = (found.tokens_lost, found.prompts_lost, found.prompts_failed, found.prompts_twice)
    assert (lost, found.is_balanced, end) == ((0, 0, 0, 0), True, TO_THE_END)


def test_tokens_in_flight_are_lost_and_no_prompt_of_a_repeated_step_counts_twice() -> None:
    killed = attempt(range(6), -9, is_signalled=True)
    found, end = judged(killed, attempt(range(4, 8), rows=tuple(row(step, lost=30) for step in range(4, 8))))
    assert found.tokens_lost == 30
    assert (found.prompts_lost, found.prompts_twice, end) == (0, 0, TO_THE_END)


def test_a_step_that_is_repeated_with_other_prompts_is_found() -> None:
    killed = attempt(range(6), -9, is_signalled=True)
    again = attempt(range(4, 8))
    others = attempt(range(4, 8), trained={**again.trained, 4: again.trained[5], 5: again.trained[4]})
    assert judged(killed, others)[1] == "BROKEN: 2 steps trained again with other prompts"
    unseen = attempt(range(6), -9, is_signalled=True, rows=tuple(map(row, range(4))))
    assert judged(unseen, others)[1] == TO_THE_END


def test_a_step_that_only_the_hook_saw_counts_if_the_checkpoint_has_it() -> None:
    killed = attempt(range(6), -9, is_signalled=True, rows=tuple(map(row, range(5))))
    found, _ = judged(killed, attempt(range(6, 8)))
    assert (found.prompts_lost, found.prompts_twice) == (0, 0)


def test_a_prompt_that_was_trained_in_two_steps_is_found() -> None:
    again = attempt(range(4, 8))
    found, end = judged(attempt(range(4), -9, is_signalled=True), again, prompts_taken=8 * BATCH + 2)
    assert found.prompts_twice == 0
    twice = attempt(range(4, 8), trained={**again.trained, 5: again.trained[4]})
    found, end = judged(attempt(range(4), -9, is_signalled=True), twice)
    assert (found.prompts_twice, found.prompts_lost) == (BATCH, BATCH)
    assert end == f"BROKEN: {BATCH} prompts lost; {BATCH} prompts counted twice"


def test_a_lost_prompt_is_found() -> None:
    found, end = judged(attempt(range(8)), prompts_taken=8 * BATCH + 3)
    assert (found.prompts_lost, end) == (1, "BROKEN: 1 prompts lost")


@pytest.mark.parametrize(
    ("first", "end"),
    [
        ({"code": 1, "said": "error: TrainerFailed: a rank died"}, DOCUMENTED),
        ({"code": 1, "said": "a warning"}, "BROKEN: exit code 1 without an error line"),
        ({"code": 1, "said": "error: OSError (a bug in asyncrl)"}, "BROKEN: an error without a name"),
        ({"code": 1, "said": "error: X", "has_traceback": True}, "BROKEN: a traceback in the output"),
        ({"code": -9, "is_signalled": True}, TO_THE_END),
        ({"code": -11}, "BROKEN: exit code -11"),
        ({"code": None}, "BROKEN: hung"),
        ({"code": -9, "is_signalled": True, "left": ("raylet",)}, "BROKEN: 1 processes left (raylet)"),
    ],
)
def test_the_verdict_names_what_is_wrong_with_an_end(first: dict[str, Any], end: str) -> None:
    assert judged(attempt(range(4), **first), attempt(range(4, 8)))[1] == end


def test_a_run_that_ends_though_it_can_continue_is_broken() -> None:
    attempts = attempt(range(4), 1, said="error: X"), attempt(range(4, 8))
    found = figures(attempts, state(8))
    end = verdict(attempts, found, num_steps=8, may_fail=False, must_continue=True)
    assert end == "BROKEN: the fault ended the run"
    continued = {fault.name for fault in all_faults() if fault.must_continue}
    assert {"kill-router", "stop-actor", "kill-front", "kill-scheduler", "stop-driver", "second-save"} <= continued
    assert {"kill-rank", "stop-rank"} <= continued
    assert not {"kill-driver", "kill-gcs", "kill-raylet"} & continued


def test_a_run_that_never_trains_to_the_end_is_broken() -> None:
    failed = attempt(range(4), 1, said="error: X")
    found = figures([failed], state(4))
    assert verdict([failed], found, num_steps=8, may_fail=False) == "BROKEN: not trained to the end after 1 attempts"


def test_a_campaign_meets_every_fault_before_it_repeats_one_and_is_repeatable() -> None:
    number = len(all_faults())
    drawn = [life(each, 7) for each in range(number)]
    assert Counter(map(named, (each.fault for each in drawn))) == Counter(map(named, all_faults()))
    assert drawn == [life(each, 7) for each in range(number)]
    assert [each.fault for each in drawn] != [life(each, 8).fault for each in range(number)]
    assert {life(each, 7, "kill-gcs").fault.name for each in range(9)} == {"kill-gcs"}


def test_the_table_has_a_line_for_each_life() -> None:
    found, end = judged(attempt(range(8)))
    told = Told(
        life=3, seed=0, fault="kill-gcs", moment="random", codes=(None, 0), said="a | b", figures=found, verdict=end
    )
    *_, line = table([orjson.loads(orjson.dumps(told.as_json()))])
    assert line == "| 3 | kill-gcs | random | killed, 0 | a \\| b |  | 0 | 0 | 0 | 0 (0.0 s) | trained to the end |"
    assert summary([told.as_json()]) == "1 lives: 1 trained to the end"


def test_shares_play_all_lives_once_and_write_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [list(Share(number, 3).lives(8)) for number in (1, 2, 3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    told = {each: Told(life=each, seed=0, fault="kill-gcs", moment="random", verdict=TO_THE_END) for each in range(4)}
    lines = [orjson.dumps(told[each].as_json()) + b"\n" for each in (3, 0, 1)]
    (tmp_path / "lives.jsonl").write_bytes(b"".join(lines))
    assert main(["--lives", "4", "--share", "2/2", "--out", str(tmp_path)]) == 0, "both lives are there"
    rows = (tmp_path / "table.md").read_text().splitlines()[2:5]
    assert [row[:5] for row in rows] == ["| 0 |", "| 1 |", "| 3 |"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lives.jsonl", "table.md"]
    with pytest.raises(SystemExit):
        main(["--share", "3/2"])
    assert "argument --share: must be I/N with I from 1 to N, got 3/2" in capsys.readouterr().err


def test_the_process_that_comes_to_an_armed_moment_waits(tmp_path: Path) -> None:
    environment = holds.environment(tmp_path / "hold", tmp_path)
    program = "import os; os.rename(os.environ['FROM'], os.environ['TO']); print('renamed', flush=True)"
    names = {"FROM": str(tmp_path / "iter_1.partial"), "TO": str(tmp_path / "iter_1")}
    (tmp_path / "iter_1.partial").touch()
    holds.arm(tmp_path / "hold", "folder")
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**environment, **names}, stdout=subprocess.PIPE, text=True
    ) as process:
        reached = threading.Event()
        while not (holds.is_reached(tmp_path / "hold") or reached.wait(0.01) or process.poll() is not None):
            continue
        assert not (tmp_path / "iter_1").exists()
        holds.release(tmp_path / "hold")
        assert process.communicate(timeout=30.0)[0] == "renamed\n"


def test_a_full_disk_is_full(tmp_path: Path) -> None:
    if why := disks.mount(tmp_path / "disk", 1):
        pytest.skip(why)
    try:
        disks.fill(tmp_path / "disk")
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "disk" / "file").write_bytes(b"x")
        disks.free(tmp_path / "disk")
        (tmp_path / "disk" / "file").write_bytes(b"x")
    finally:
        disks.unmount(tmp_path / "disk")


def test_an_unknown_fault_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "kill-everything"])
    assert ended.value.code == 2
    assert "--only kill-everything: no such fault; one of " in capsys.readouterr().err


@pytest.mark.timeout(2700)
def test_a_run_whose_driver_is_killed_resumes_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lives, "NUM_STEPS", SHORT)
    for flag in ("num-rollout", "eval-interval"):
        monkeypatch.setitem(cast(dict[str, object], lives.FLAGS), flag, SHORT)
    killed_early = ["--lives", "1", "--seed", "6", "--only", "kill-driver@commit", "--out", str(tmp_path)]
    assert main(killed_early) == 0
    (told,) = (orjson.loads(line) for line in (tmp_path / "lives.jsonl").read_bytes().splitlines())
    assert told["verdict"] == TO_THE_END
    assert told["codes"] == [-9, 0]
    assert told["said"].startswith("error: the program (process ")
    assert main(killed_early) == 0, "it is not repeated"
