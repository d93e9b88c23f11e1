"""The whole loop on a CPU: real SGLang behind the real router, real Megatron, real Ray, real sockets."""

import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from asyncrl.rollout_log.batch_file import read_batch
from asyncrl.rollout_log.files import file_of
from tests.integration.launcher import FATES, QUICKSTART, RUN_S, START_S, Launched, Outcome, run

MIXTURE = ("--config", "configs/quickstart_moe.toml")
STEPS = 12
SHORT = ("--num-rollout", str(STEPS), "--eval-interval", "4", "--rollout-top-p", "0.9", "--rollout-top-k", "20")
"""Each limit of sampling alone is a test of the engine's columns; both at once keep other ids than either."""

TIMED = ("train/logprob_diff",)
"""Numbers of the trainer that depend on engines."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run of a mixture of experts that trained some steps, and got SIGTERM while it stopped its processes."""
    folder = tmp_path_factory.mktemp("runs")
    saves = ("--save-debug-rollout-data", str(folder / "batches" / "{rollout_id}.batch"))
    launched = Launched(folder / "short", (*MIXTURE, *SHORT, *saves))
    launched.wait_for_output("stopping", RUN_S)
    for _ in range(6):  # Ray's core takes the handlers away while it ends
        launched.send(signal.SIGTERM)
        time.sleep(0.3)
    return launched.end_in_time(0)  # it had nothing left to train or to save


def test_a_run_reports_every_step_and_accounts_for_every_token(short: Outcome) -> None:
    assert [row["step"] for row in short.rows] == list(range(STEPS))
    for row in short.rows:
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)
    assert short.rows[-1]["tokens/held"] == 0


def test_every_sample_is_written(short: Outcome) -> None:
    files = sorted((short.run_dir / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.parquet" for step in range(STEPS)]
    samples = [sample for file in files for sample in pq.read_table(file).to_pylist()]
    assert sum(len(sample["tokens"]) for sample in samples) == short.rows[-1]["tokens/trained"]
    for name in ("logprobs", "trainer_logprobs", "advantages", "loss_mask"):
        assert all(len(sample[name]) == len(sample["tokens"]) for sample in samples)
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for sample in samples:
        group = groups.setdefault((sample["step"], sample["group_id"]), [])
        group.append((sample["reward"], sample["advantages"][0]))
    for found in groups.values():
        assert abs(sum(advantage for _, advantage in found)) < 1e-4
        assert len({reward for reward, _ in found}) == len({advantage for _, advantage in found})


def test_saved_batches_train_again_to_the_same_numbers_bit_by_bit(short: Outcome, tmp_path: Path) -> None:
    steps, pattern = 3, str(short.run_dir.parent / "batches" / "{rollout_id}.batch")
    again = run(tmp_path / "again", *MIXTURE, "--num-rollout", str(steps), "--load-debug-rollout-data", pattern)
    assert again.code == 0, again.output
    assert "SGLang" not in again.output
    for before, after in zip(short.rows[:steps], again.rows, strict=True):
        same = [name for name in before if name.startswith(("train/", "reward/", "lag/")) and name not in TIMED]
        assert {name: before[name] for name in same} == {name: after[name] for name in same}


def test_engines_alone_generate_and_save_batches(tmp_path: Path) -> None:
    steps, pattern = 3, str(tmp_path / "batches" / "{rollout_id}.batch")
    flags = ("--num-rollout", str(steps), "--eval-interval", "2", "--save-debug-rollout-data", pattern)
    outcome = run(tmp_path / "alone", *QUICKSTART, *flags, "--debug-rollout-only")
    assert outcome.code == 0, outcome.output
    assert "1 SGLang, no trainer" in outcome.output
    assert [(row["step"], row["version"], row["lag/max"]) for row in outcome.rows] == [(0, 0, 0), (1, 0, 1), (2, 0, 2)]
    assert {row["eval/step"] for row in outcome.rows if "eval/step" in row} == {0}
    assert not [name for row in outcome.rows for name in row if name.startswith("train/")]
    last = outcome.rows[-1]
    assert last["tokens/generated"] == last["tokens/trained"] > 0
    for step in range(steps):
        saved = read_batch(tmp_path / "batches" / f"{step}.batch")
        written = pq.read_table(file_of(outcome.run_dir, step)).to_pylist()
        samples = [scored for group in saved.groups for scored in group.samples]
        assert [(row["tokens"], row["reward"]) for row in written] == [
            (list(scored.sample.token_ids), scored.reward) for scored in samples
        ]
        assert {row["trainer_logprobs"] for row in written} == {None}
    assert not (outcome.run_dir / "model").exists()


def test_no_token_is_older_than_the_bound(short: Outcome) -> None:
    assert max(row["lag/max"] for row in short.rows) <= 1


def test_engine_and_trainer_agree_on_log_probs(short: Outcome) -> None:
    compared = [row["train/logprob_diff"] for row in short.rows if "train/logprob_diff" in row]
    # None in a step without answers of the present weights: within top-p, engines score no older ones.  About 1e-7 in
    # the others; weights that did not arrive give 1e-2 and more in every step.
    assert len(compared) >= 2
    assert median(compared) < 1e-5
    assert max(compared) < 1e-2
    assert short.rows[0]["lag/max"] == 0
    assert short.rows[0]["mismatch/age/0/logprob_mean"] < 1e-5  # later answers may have a KV cache of older weights
    assert short.rows[0]["mismatch/age/0/logprob_max"] < 1e-4  # over the whole vocabulary, up to log 1 / 0.9
    assert "are not known" not in (short.run_dir / "run.log").read_text()


def test_accuracy_is_measured_before_during_and_after(short: Outcome) -> None:
    assert "eval/accuracy" in short.rows[0]
    assert short.rows[0]["eval/step"] == 0
    assert short.rows[-1]["eval/step"] == STEPS


def test_samples_are_generated_while_the_trainer_trains(short: Outcome) -> None:
    events = orjson.loads((short.run_dir / "timeline.json").read_bytes())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    training = [event for event in events if _is(event, names, "trainer") and event["name"].startswith("step")]
    samples = [event for event in events if _is(event, names, "samples in flight") and event["name"].startswith("g")]
    overlapping = sum(any(_overlap(step, sample) for sample in samples) for step in training[:-2])
    assert len(training) == STEPS
    assert overlapping >= 2  # none in a synchronous run; on a busy machine a step may follow its last sample


def _is(event: dict[str, Any], names: dict[int, str], track: str) -> bool:
    return event["ph"] == "X" and names[event["pid"]] == track


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"])


def test_the_run_directory_has_every_expected_file(short: Outcome) -> None:
    files = {"metrics.jsonl", "timeline.json", "run.log", "versions.json", "quickstart_moe.toml"}
    assert files | {"tensorboard", "model"} <= {path.name for path in short.run_dir.iterdir()}
    versions = orjson.loads((short.run_dir / "versions.json").read_bytes())
    assert versions["plugins"]["sglang-0"] == dict.fromkeys(("direct", "memory_saver", "routes", "stamps"), "active")
    assert "SGLang runs without plug-ins" not in (short.run_dir / "run.log").read_text()


def test_the_final_model_loads_in_transformers(short: Outcome) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(short.run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(short.run_dir / "model")
    assert model(tokenizer("1+2=", return_tensors="pt").input_ids).logits.shape[-1] == model.config.vocab_size


@pytest.mark.parametrize(("phase", "then_s"), [("starting Ray", 0.5), ("loading the model", 2.0)])
def test_sigterm_during_the_start_ends_everything_in_time(tmp_path: Path, phase: str, then_s: float) -> None:
    launched = Launched(tmp_path / "run", (*QUICKSTART, "--load", str(tmp_path / "saved")))
    launched.wait_for_output(phase, START_S)
    time.sleep(then_s)
    launched.send(signal.SIGTERM)
    outcome = launched.end_in_time(143)
    assert f"no checkpoint in {tmp_path / 'saved'}: starting from " in outcome.output
    assert "SIGTERM: ended after 0 of 60 steps; there is no checkpoint of it" in outcome.output


def test_a_wrong_checkpoint_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("7")
    outcome = run(tmp_path / "run", *QUICKSTART, "--load", str(tmp_path / "saved"))
    assert outcome.code == 2
    assert "names iter_0000007, which is not there or not complete" in outcome.output
    assert "Ray" not in outcome.output
