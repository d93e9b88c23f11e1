"""The whole loop on a CPU: real SGLang behind the real router, real Megatron, real Ray, real sockets."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from tests.integration.launcher import Launched, Outcome, run

QUICKSTART = ("--config", "configs/quickstart.toml")
QUICKSTART_STEPS = 60
"""In its file."""
SHORT = ("--num-rollout", "8", "--eval-interval", "4")
SYNCHRONOUS = ("--max-staleness", "0")
REPEATED_STEPS = 5
"""Two synchronous runs are compared over as many, and each ends in another way: a run of its own for that is 50 s."""
STEPS_AFTER = 2
"""After an engine died."""
SAVED_STEPS = 3
"""The synchronous runs leave a checkpoint of as many."""
SAME = ("train/loss", "train/grad_norm", "train/lr", "reward/mean", "response/tokens_mean", "version")
COUNTS = ("tokens/generated", "tokens/trained", "groups/admitted", "groups/trained", "groups/stale")
FATES = ("trained", "masked", "filtered", "stale", "failed", "held")
START_S = 300.0
"""For a run to come to its first steps on a busy machine."""
RUN_S = 400.0
"""For a run of a few steps to come to its end there."""

NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""That share this machine's processors with us."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run of a few steps."""
    return run(tmp_path_factory.mktemp("runs") / "short", *QUICKSTART, *SHORT)


def test_a_run_ends_well_and_leaves_no_process(short: Outcome) -> None:
    assert short.code == 0, short.output
    assert short.left == ()


def test_a_run_reports_every_step_and_accounts_for_every_token(short: Outcome) -> None:
    assert [row["step"] for row in short.rows] == list(range(8))
    for row in short.rows:
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)
    assert short.rows[-1]["tokens/held"] == 0


def test_no_token_is_older_than_the_bound(short: Outcome) -> None:
    assert max(row["lag/max"] for row in short.rows) <= 1


def test_engine_and_trainer_agree_on_log_probs(short: Outcome) -> None:
    assert all(row["train/logprob_diff"] < 1e-4 for row in short.rows)


def test_accuracy_is_measured_before_during_and_after(short: Outcome) -> None:
    assert "eval/accuracy" in short.rows[0]
    assert short.rows[0]["eval/step"] == 0
    assert short.rows[-1]["eval/step"] == 8


def test_samples_are_generated_while_the_trainer_trains(short: Outcome) -> None:
    events = orjson.loads((short.run_dir / "timeline.json").read_bytes())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    training = [event for event in events if _is(event, names, "trainer") and event["name"].startswith("step")]
    samples = [event for event in events if _is(event, names, "samples in flight") and event["name"].startswith("g")]
    overlapping = sum(any(_overlap(step, sample) for sample in samples) for step in training[:-2])
    assert len(training) == 8
    assert overlapping >= 4


def _is(event: dict[str, Any], names: dict[int, str], track: str) -> bool:
    return event["ph"] == "X" and names[event["pid"]] == track


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"])


def test_the_run_directory_holds_what_it_should(short: Outcome) -> None:
    expected = {"metrics.jsonl", "timeline.json", "run.log", "versions.json", "quickstart.toml", "tensorboard", "model"}
    assert expected <= {path.name for path in short.run_dir.iterdir()}


def test_the_final_model_loads_in_transformers(short: Outcome) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(short.run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(short.run_dir / "model")
    assert model(tokenizer("1+2=", return_tensors="pt").input_ids).logits.shape[-1] == model.config.vocab_size


def ends_in_time(launched: Launched, code: int) -> Outcome:
    """The run, which was just sent a signal, ends with ``code``, leaves nothing behind, and takes 15 s if alone."""
    began = time.monotonic()
    outcome = launched.finish(60.0)
    assert outcome.code == code, outcome.output
    assert outcome.left == ()
    assert time.monotonic() - began < 15.0 * NUM_WORKERS
    assert "Traceback" not in outcome.output
    return outcome


def test_sigterm_in_mid_run_ends_everything_in_time(tmp_path: Path) -> None:
    launched = Launched(tmp_path / "run", QUICKSTART)
    launched.wait_for_steps(3, START_S)
    launched.send(signal.SIGTERM)
    ends_in_time(launched, 143)


@pytest.mark.parametrize(
    ("phase", "then_s"),
    [("starting Ray", 0.5), ("loading the model", 2.0), ("loading the model", 15.0)],
)
def test_sigterm_during_the_start_ends_everything_in_time(tmp_path: Path, phase: str, then_s: float) -> None:
    launched = Launched(tmp_path / "run", QUICKSTART)
    launched.wait_for_output(phase, START_S)
    time.sleep(then_s)
    launched.send(signal.SIGTERM)
    ends_in_time(launched, 143)


def test_a_mixture_of_experts_trains_and_sigterm_while_it_stops_ends_everything_in_time(tmp_path: Path) -> None:
    launched = Launched(tmp_path / "run", ("--config", "configs/quickstart_moe.toml", "--num-rollout", "3"))
    launched.wait_for_output("stopping", RUN_S)
    time.sleep(0.3)
    launched.send(signal.SIGTERM)
    for _ in range(5):  # Ray's core takes the handlers away while it ends
        time.sleep(0.3)
        launched.send(signal.SIGTERM)
    outcome = ends_in_time(launched, 143)
    assert [row["step"] for row in outcome.rows] == [0, 1, 2]
    assert all(row["train/logprob_diff"] < 1e-4 for row in outcome.rows)
    assert (outcome.run_dir / "model" / "config.json").exists()


def members(launched: Launched, victim: str) -> list[psutil.Process]:
    """The run's processes with ``victim`` in their command line."""
    return [process for process in launched.members() if any(victim in word for word in process.cmdline())]


def names_what_died(launched: Launched, victim: str, line: str) -> Outcome:
    """The run, whose process with ``victim`` in its command line is killed now, ends with one line that names it."""
    members(launched, victim)[0].kill()
    outcome = launched.finish(60.0)
    assert outcome.code == 1, outcome.output
    assert line in outcome.output
    assert "Traceback" not in outcome.output
    assert outcome.left == ()
    assert "Traceback" in (outcome.run_dir / "run.log").read_text()
    return outcome


@pytest.fixture(scope="module")
def after_ctrl_c(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A synchronous run of some steps that Ctrl-C ended in time."""
    launched = synchronous(tmp_path_factory)
    launched.send_to_group(signal.SIGINT)
    return ends_in_time(launched, 130)


@pytest.fixture(scope="module")
def after_a_dead_server(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run again; its server dies and is started again, then its trainer dies, which ends the run."""
    launched = synchronous(tmp_path_factory)
    server = members(launched, "sglang.launch_server")[0]
    assert server.nice() == psutil.Process().nice()  # Ray's own 15 starves a run beside anything else
    server.kill()
    launched.wait_for_steps(REPEATED_STEPS + STEPS_AFTER, START_S)
    return names_what_died(launched, "ray::RankActor", "error: TrainerFailed: trainer rank 0")


def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("synchronous")
    saving = ("--save", str(folder / "saved"), "--save-interval", str(SAVED_STEPS))
    launched = Launched(folder / "run", (*QUICKSTART, *SYNCHRONOUS, *saving))
    launched.wait_for_steps(REPEATED_STEPS, START_S)
    return launched


def test_ctrl_c_in_mid_run_ends_everything_in_time(after_ctrl_c: Outcome) -> None:
    assert len(after_ctrl_c.rows) < QUICKSTART_STEPS


def test_a_dead_trainer_ends_the_run_with_one_line_that_names_it(after_a_dead_server: Outcome) -> None:
    assert len(after_a_dead_server.rows) < QUICKSTART_STEPS


def test_a_dead_engine_is_started_again_and_nothing_is_lost(after_a_dead_server: Outcome) -> None:
    log = (after_a_dead_server.run_dir / "run.log").read_text()
    assert "sglang-0 is back, with the present weights" in log
    rows = after_a_dead_server.rows
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= REPEATED_STEPS + STEPS_AFTER
    assert {row["lag/max"] for row in rows} == {0}
    assert all(row["tokens/failed"] == row["groups/failed"] == row["groups/stale"] == 0 for row in rows)
    assert rows[REPEATED_STEPS + 1]["retries"] > rows[REPEATED_STEPS - 1]["retries"]
    for row in rows[REPEATED_STEPS:]:
        assert row["train/logprob_diff"] < 1e-4
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)


def test_without_staleness_a_repeated_run_gets_the_same_rewards(
    after_ctrl_c: Outcome, after_a_dead_server: Outcome
) -> None:
    first, second = (outcome.rows[:REPEATED_STEPS] for outcome in (after_ctrl_c, after_a_dead_server))
    assert [row["step"] for row in first] == [row["step"] for row in second] == list(range(REPEATED_STEPS))
    assert {row["lag/max"] for row in first} == {0}
    assert [row["reward/mean"] for row in first] == [row["reward/mean"] for row in second]
    assert [row["train/loss"] for row in first] == [row["train/loss"] for row in second]


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(after_ctrl_c: Outcome, tmp_path: Path) -> None:
    """And whichever way its weights go to the engines: here by disk."""
    load = ("--load", str(after_ctrl_c.run_dir.parent / "saved"))
    disk = ("--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path / "disk"))
    steps = ("--num-rollout", str(REPEATED_STEPS + 1))
    resumed = run(tmp_path / "resumed", *QUICKSTART, *SYNCHRONOUS, *steps, *load, *disk)
    assert resumed.code == 0, resumed.output
    assert list((tmp_path / "disk").iterdir()) == []
    assert resumed.left == ()
    assert [row["step"] for row in resumed.rows] == list(range(SAVED_STEPS, REPEATED_STEPS + 1))
    straight = after_ctrl_c.rows[SAVED_STEPS:REPEATED_STEPS]
    for row, expected in zip(resumed.rows, straight, strict=False):
        assert {name: row[name] for name in SAME + COUNTS} == {name: expected[name] for name in SAME + COUNTS}
    assert all(row["train/logprob_diff"] < 1e-4 for row in resumed.rows)


def test_a_wrong_checkpoint_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("7")
    outcome = run(tmp_path / "run", *QUICKSTART, "--load", str(tmp_path / "saved"))
    assert outcome.code == 2
    assert "names iter_0000007, which is not there or not complete" in outcome.output
    assert "Ray" not in outcome.output
