"""Runs without staleness repeat each other exactly: after Ctrl-C, a lost engine, a restart, and on shared GPUs."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.launcher import FATES, QUICKSTART, QUICKSTART_STEPS, START_S, Launched, Outcome, run
from tests.programs import words_of

SYNCHRONOUS = (*QUICKSTART, "--max-staleness", "0")
REPEATED_STEPS = 4
"""The steps over which two runs are compared.  Each ends in another way, which saves separate runs of 50 s."""
STEPS_AFTER = 2
"""Steps after the death of an engine."""
SAVED_STEPS = 3
"""The step of the checkpoint that the runs leave."""
LAST = 8
"""Steps of the resumed run.  In the run whose trainer dies, it comes back before the last ones."""
SAME = ("train/loss", "train/grad_norm", "train/lr", "reward/mean", "response/tokens_mean")
COUNTS = ("tokens/trained", "groups/trained", "groups/stale")
HOLDERS = ["trainer", "update", "engines"]

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def after_ctrl_c(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run of some steps, whose weights went through a disk, that ended in time after Ctrl-C."""
    folder = tmp_path_factory.mktemp("interrupted")
    launched = begun(folder, "--update-weight-transport", "disk", "--update-weight-disk-dir", str(folder))
    launched.wait_for_steps(REPEATED_STEPS, START_S)
    launched.send_to_group(signal.SIGINT)
    return launched.end_in_time(130)


@pytest.fixture(scope="module")
def after_deaths(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run again: its server dies, its trainer dies, and both come back; a trainer that stays dead ends it."""
    launched = begun(tmp_path_factory.mktemp("lost"), "--max-trainer-restarts", "1")
    server = members(launched, "sglang.launch_server")[0]
    assert server.nice() == psutil.Process().nice()  # Ray's default of 15 starves a run on a busy machine
    launched.wait_for_steps(REPEATED_STEPS, START_S)
    server.kill()  # at once, or the requests of the next step have been answered
    launched.wait_for_steps(REPEATED_STEPS + STEPS_AFTER, START_S)
    engines = {each.pid for each in members(launched, "sglang::")}
    members(launched, "ray::RankActor")[0].kill()
    launched.wait_for_output("trainer restarted: ", START_S)
    launched.wait_for_steps(LAST, START_S)
    with launched.killed_by_a_failure():
        assert {each.pid for each in members(launched, "sglang::")} >= engines, "an engine was restarted"
        lost = members(launched, "ray::RankActor")[0]
        lost.kill()
    launched.wait_until(lambda: any(each != lost for each in members(launched, "ray::RankActor")), "a rank", START_S)
    for rank in members(launched, "ray::RankActor"):
        rank.kill()
    return launched.finish(60.0)


@pytest.fixture(scope="module")
def resumed(after_ctrl_c: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that resumes the first one's checkpoint; trainer and engine time-share the same processors."""
    folder = tmp_path_factory.mktemp("resumed")
    flags = ("--load", str(after_ctrl_c.run_dir.parent / "saved"), "--colocate", "--num-rollout", str(LAST))
    often = ("--eval-interval", "2", "--n-samples-per-eval-prompt", "1", "--save-interval", "2")
    return run(folder / "run", *SYNCHRONOUS, *flags, *often, "--save", str(folder / "saved"))


def begun(folder: Path, *flags: str) -> Launched:
    """A run that has trained its first step."""
    saving = ("--save", str(folder / "saved"), "--save-interval", str(SAVED_STEPS))
    launched = Launched(folder / "run", (*SYNCHRONOUS, *saving, *flags))
    launched.wait_for_steps(1, START_S)
    return launched


def members(launched: Launched, name: str) -> list[psutil.Process]:
    """The run's processes with ``name`` in their command line."""
    return [process for process in launched.members() if any(name in word for word in words_of(process))]


# ---- two runs with the same flags but for their transport


def test_an_interrupted_run_prints_how_to_resume_it(after_ctrl_c: Outcome) -> None:
    folder = after_ctrl_c.run_dir.parent / "saved"
    assert "SIGINT: ended after " in after_ctrl_c.output
    newest = re.escape(f"{folder}/iter_0000003")
    assert re.search(
        f"is {newest}(, without the last [^;]+)?; to resume, repeat the command with --load", after_ctrl_c.output
    )


def test_engine_and_trainer_agree_on_every_token(after_ctrl_c: Outcome) -> None:
    assert {row["lag/max"] for row in after_ctrl_c.rows} == {0}
    assert max(row["mismatch/logprob_max"] for row in after_ctrl_c.rows) < 1e-4


def test_ctrl_c_in_mid_run_ends_everything_in_time(after_ctrl_c: Outcome) -> None:
    assert len(after_ctrl_c.rows) < QUICKSTART_STEPS


def test_weights_written_for_updates_are_removed_and_nothing_else(after_ctrl_c: Outcome) -> None:
    assert {path.name for path in after_ctrl_c.run_dir.parent.iterdir()} == {"run", "run.output", "saved"}


def test_a_trainer_that_dies_while_it_starts_again_ends_the_run_with_one_line(after_deaths: Outcome) -> None:
    assert after_deaths.code == 1, after_deaths.output
    assert "error: TrainerFailed: " in after_deaths.output
    assert "restarts since the last completed step: 1 (max-trainer-restarts)" in after_deaths.output
    assert "Traceback" not in after_deaths.output
    assert "Traceback" in (after_deaths.run_dir / "run.log").read_text()
    assert after_deaths.left == ()
    assert len(after_deaths.rows) < QUICKSTART_STEPS


def test_a_dead_engine_is_restarted_and_no_token_is_lost(after_deaths: Outcome) -> None:
    log = (after_deaths.run_dir / "run.log").read_text()
    assert "sglang-0 is back, with the present weights" in log
    rows = after_deaths.rows
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= REPEATED_STEPS + STEPS_AFTER
    assert {row["lag/max"] for row in rows} == {0}
    assert all(row["tokens/failed"] == row["groups/failed"] == row["groups/stale"] == 0 for row in rows)
    assert rows[-1]["retries"] > rows[REPEATED_STEPS - 1]["retries"]
    for row in rows[REPEATED_STEPS:LAST]:
        assert row["train/logprob_diff"] < 1e-4
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)


def test_a_dead_trainer_comes_back_and_nothing_is_generated_again(after_deaths: Outcome) -> None:
    """Its steps are those of a run without a death: see the resumed run."""
    last = after_deaths.rows[LAST - 1]
    assert last["trainer/restarts"] == 1
    assert last["time/without_training_s"] > 0.0
    assert last["tokens/lost"] == last["tokens/stale"] == 0
    versions = [row["version"] for row in after_deaths.rows]
    assert versions == sorted(set(versions))


def test_a_repeated_run_gets_the_same_rewards(after_ctrl_c: Outcome, after_deaths: Outcome) -> None:
    first, second = (outcome.rows[:REPEATED_STEPS] for outcome in (after_ctrl_c, after_deaths))
    assert [row["step"] for row in first] == [row["step"] for row in second] == list(range(REPEATED_STEPS))
    assert {row["lag/max"] for row in first} == {0}
    assert [row["reward/mean"] for row in first] == [row["reward/mean"] for row in second]
    assert [row["train/loss"] for row in first] == [row["train/loss"] for row in second]


# ---- the resumed run on shared processors: everything that is done on GPUs, but no memory is saved


def test_a_run_ends_well_and_leaves_no_process(resumed: Outcome) -> None:
    assert resumed.code == 0, resumed.output
    assert resumed.left == ()
    assert (resumed.run_dir / "model" / "model.safetensors").exists()


def test_a_resumed_run_continues_as_if_it_had_not_ended(
    after_ctrl_c: Outcome, after_deaths: Outcome, resumed: Outcome
) -> None:
    assert [row["step"] for row in resumed.rows] == list(range(SAVED_STEPS, LAST))
    straight = after_deaths.rows[SAVED_STEPS:LAST]
    assert len(straight) == LAST - SAVED_STEPS
    for row, expected in zip(resumed.rows, straight, strict=True):
        assert {name: row[name] for name in SAME} == {name: expected[name] for name in SAME}
    assert {name: resumed.rows[-1][name] for name in COUNTS} == {name: straight[-1][name] for name in COUNTS}


def test_what_the_journal_has_is_not_generated_again(after_ctrl_c: Outcome, resumed: Outcome) -> None:
    """The run that ended had trained further than its checkpoint."""
    assert len(after_ctrl_c.rows) > SAVED_STEPS
    told = len(after_ctrl_c.rows) - SAVED_STEPS
    numbers = (told, told + 1)  # Ctrl-C may come between a step and its row
    assert any(f"the journal has {number} batches to train again" in resumed.output for number in numbers)
    log = (resumed.run_dir / "run.log").read_text()
    assert f"step {SAVED_STEPS}: trains the batch of the journal" in log
    first, last = resumed.rows[0], after_ctrl_c.rows[-1]
    assert first["tokens/generated"] >= last["tokens/generated"]
    assert first["version"] > last["version"]


def test_engines_on_shared_gpus_serve_the_trainers_weights_after_every_update(resumed: Outcome) -> None:
    again = len(re.findall("trains the batch of the journal", (resumed.run_dir / "run.log").read_text()))
    assert all(row["train/logprob_diff"] < 1e-4 for row in resumed.rows[again:])  # none for tokens of the run before
    assert all(row["lag/max"] == 0 for row in resumed.rows)


def test_trainer_update_and_engines_hold_the_shared_gpus_in_order(resumed: Outcome) -> None:
    log = (resumed.run_dir / "run.log").read_text()
    first = ["update", "engines"]  # the trainer has the GPUs when it has loaded
    holders = [*first, *HOLDERS * (LAST - SAVED_STEPS), "trainer"]
    assert re.findall(r"the GPUs pass to the (\w+) in", log) == holders


def test_a_run_on_shared_gpus_saves_and_evaluates_at_its_intervals(resumed: Outcome) -> None:
    saved = sorted(path.name for path in (resumed.run_dir.parent / "saved").glob("iter_*"))
    assert saved == ["iter_0000004", "iter_0000006", "iter_0000008"]
    assert [row["eval/step"] for row in resumed.rows if "eval/step" in row] == [4, 6, 8]


def test_shared_gpus_with_staleness_are_refused_before_anything_starts(tmp_path: Path) -> None:
    outcome = run(tmp_path / "run", *QUICKSTART, "--colocate", "--max-staleness", "1")
    assert outcome.code == 2
    assert "error: colocate with max-staleness 1: engines have no memory while the trainer works" in outcome.output
