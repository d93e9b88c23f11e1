"""The whole loop on a CPU: real SGLang behind the real router, real Megatron, real Ray, real sockets."""

import signal
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.integration.launcher import Launched, Outcome, run

QUICKSTART = ("--config", "configs/quickstart.toml")
SHORT = ("--num-rollout", "8", "--eval-interval", "4")
START_S = 300.0
"""For a run to come to its first steps on a busy machine."""

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
        spent = sum(row[f"tokens/{fate}"] for fate in ("trained", "masked", "filtered", "stale", "failed", "held"))
        assert row["tokens/generated"] == spent
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


def test_without_staleness_a_repeated_run_gets_the_same_rewards(tmp_path: Path) -> None:
    synchronous = (*QUICKSTART, "--num-rollout", "5", "--eval-interval", "5", "--max-staleness", "0")
    first, second = (run(tmp_path / name, *synchronous) for name in ("first", "second"))
    assert first.code == second.code == 0, first.output + second.output
    assert {row["lag/max"] for row in first.rows} == {0}
    assert [row["reward/mean"] for row in first.rows] == [row["reward/mean"] for row in second.rows]
    assert [row["train/loss"] for row in first.rows] == [row["train/loss"] for row in second.rows]


def test_a_mixture_of_experts_trains(tmp_path: Path) -> None:
    outcome = run(tmp_path / "moe", "--config", "configs/quickstart_moe.toml", "--num-rollout", "3")
    assert outcome.code == 0, outcome.output
    assert all(row["train/logprob_diff"] < 1e-4 for row in outcome.rows)
    assert outcome.left == ()


def ends_in_time(launched: Launched, code: int) -> None:
    """The run, which was just sent a signal, ends within 15 s with ``code`` and leaves nothing behind."""
    began = time.monotonic()
    outcome = launched.finish(60.0)
    assert outcome.code == code, outcome.output
    assert outcome.left == ()
    assert time.monotonic() - began < 15.0
    assert "Traceback" not in outcome.output


def test_sigterm_in_mid_run_ends_everything_in_time(tmp_path: Path) -> None:
    launched = Launched(tmp_path / "run", QUICKSTART)
    launched.wait_for_steps(3, START_S)
    launched.send(signal.SIGTERM)
    ends_in_time(launched, 143)


def test_ctrl_c_in_mid_run_ends_everything_in_time(tmp_path: Path) -> None:
    launched = Launched(tmp_path / "run", QUICKSTART)
    launched.wait_for_steps(2, START_S)
    launched.send_to_group(signal.SIGINT)
    ends_in_time(launched, 130)


@pytest.mark.parametrize(
    ("phase", "then_s"),
    [("starting Ray", 0.5), ("starting Ray", 3.0), ("loading the model", 2.0), ("loading the model", 15.0)],
)
def test_sigterm_during_the_start_ends_everything_in_time(tmp_path: Path, phase: str, then_s: float) -> None:
    launched = Launched(tmp_path / "run", QUICKSTART)
    launched.wait_for_output(phase, START_S)
    time.sleep(then_s)
    launched.send(signal.SIGTERM)
    ends_in_time(launched, 143)


def test_sigterm_while_a_finished_run_stops_ends_everything_in_time(tmp_path: Path) -> None:
    launched = Launched(tmp_path / "run", (*QUICKSTART, "--num-rollout", "2"))
    launched.wait_for_output("stopping", START_S)
    time.sleep(0.3)
    launched.send(signal.SIGTERM)
    for _ in range(5):  # Ray's core takes the handlers away while it ends
        time.sleep(0.3)
        launched.send(signal.SIGTERM)
    ends_in_time(launched, 143)


@pytest.mark.parametrize(
    ("victim", "line"),
    [
        ("sglang.launch_server", "error: ServerFailed: sglang-0 ended"),
        ("ray::RankActor", "error: TrainerFailed: trainer rank 0"),
    ],
)
def test_a_dead_process_ends_the_run_with_one_line_that_names_it(tmp_path: Path, victim: str, line: str) -> None:
    launched = Launched(tmp_path / "run", QUICKSTART)
    launched.wait_for_steps(2, START_S)
    found = [process for process in launched.members() if any(victim in word for word in process.cmdline())]
    found[0].kill()
    outcome = launched.finish(60.0)
    assert outcome.code == 1, outcome.output
    assert line in outcome.output
    assert "Traceback" not in outcome.output
    assert outcome.left == ()
    assert "Traceback" in (outcome.run_dir / "run.log").read_text()
