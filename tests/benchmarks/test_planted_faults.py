"""The plans of the benchmark, its faults and its report; the runs themselves take minutes each."""

import json
import lzma
from collections.abc import Mapping
from pathlib import Path

import pytest

from asyncrl.config.load import load_run
from asyncrl.data.tokenizer import load_tokenizer
from benchmarks.planted_faults.plans import MODEL, Plan, plans
from benchmarks.planted_faults.report import Outcome, failures, table, write_rows

BY_NAME = {plan.name: plan for plan in plans()}
SOUND = {step: {"step": step, "reward/mean": 0.5, "reward/std": 0.4, "eval/accuracy": 0.123456} for step in range(12)}
CONSTANT = {step: {**row, "reward/std": 0.0} for step, row in SOUND.items()}


def outcome(name: str, rows: Mapping[int, Mapping[str, float]], code: int = 0) -> Outcome:
    return Outcome(plan=BY_NAME[name], code=code, rows=rows)


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: plan.name)
def test_every_plan_is_a_configuration_that_can_be_loaded(plan: Plan, tmp_path: Path) -> None:
    run = load_run([*plan.words(tmp_path), "--run-dir", str(tmp_path / "run")])
    assert run.rollout.num_rollout == plan.num_steps


def test_there_are_six_faults_and_ten_healthy_runs() -> None:
    assert [plan.is_faulty for plan in plans()] == [True] * 6 + [False] * 10


def test_the_shifted_tokenizer_gives_each_character_the_next_id(tmp_path: Path) -> None:
    model = BY_NAME["shifted-tokenizer"].prepare(tmp_path)["hf-checkpoint"]
    right, shifted = load_tokenizer(MODEL), load_tokenizer(Path(str(model)))
    assert shifted.encode("470+4=") == [token + 1 for token in right.encode("470+4=")]
    assert shifted.encode("<end>") == right.encode("<end>")


def test_only_the_wrong_template_changes_prompts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    rendered = {}
    for name in ("right-template", "wrong-template"):
        (tmp_path / name).mkdir()
        model = BY_NAME[name].prepare(tmp_path / name)["hf-checkpoint"]
        rendered[name] = load_tokenizer(Path(str(model))).render(chat)
    assert rendered == {"right-template": "1+1=", "wrong-template": "<im_start>user 1+1=<im_end>"}


def test_a_fault_without_alarm_and_a_healthy_run_with_one_fail() -> None:
    good = [outcome("constant-reward", CONSTANT), outcome("plain", SOUND)]
    assert failures(good) == []
    bad = [outcome("constant-reward", SOUND), outcome("plain", CONSTANT), outcome("mixture", {}, code=1)]
    assert failures(bad) == [
        "constant-reward: no alarm in the first 10 steps",
        "plain: a healthy run has alarms",
        "mixture: ended with exit code 1",
    ]


def test_an_alarm_after_ten_steps_is_too_late() -> None:
    late = {step: CONSTANT[step % 12] if step > 6 else SOUND[step] for step in range(12)}
    assert failures([outcome("constant-reward", late)]) == ["constant-reward: no alarm in the first 10 steps"]


def test_the_table_has_the_alarms_with_their_steps() -> None:
    lines = table([outcome("constant-reward", CONSTANT), outcome("plain", SOUND)])
    assert lines[2].endswith("| 12 | 0.50 | Reward without variance (3) |")
    assert lines[3].endswith("| 12 | 0.50 | none |")


def test_the_numbers_of_runs_are_written_without_those_that_no_rule_reads(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json.xz", [outcome("plain", SOUND)])
    written = json.loads(lzma.decompress((tmp_path / "rows.json.xz").read_bytes()))
    assert written["plain"]["rows"][3] == {"step": 3.0, "reward/mean": 0.5, "reward/std": 0.4}
