"""Commands of slime's guides train: two steps on a CPU, with the whole list of flags and smaller numbers behind it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.launcher import FATES, Outcome, run
from tests.launch.guide_commands import guide_commands, local_files, with_files

STEPS = 2
SMALL = """
--device cpu --actor-num-gpus-per-node 1 --rollout-num-gpus-per-engine 1 --context-parallel-size 1
--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8 --rollout-max-response-len 16
--n-samples-per-eval-prompt 1 --eval-max-response-len 16
--sglang-max-total-tokens 65536 --sglang-server-concurrency 32
"""
"""Flags behind those of a command, which replace them: the numbers of a small machine."""

pytestmark = pytest.mark.timeout(1800)


def trained(folder: Path, name: str, *more: str) -> Outcome:
    """Run a command of the guides for two steps."""
    (command,) = (command for command in guide_commands() if command.name == name)
    words = with_files((*command.words, *_small(command.words), *more), local_files(folder))
    outcome = run(folder / "run", *words, program=command.program)
    assert outcome.code == 0, outcome.output
    for note in command.notes:
        assert f"note: {note}" in outcome.output
        assert note in (outcome.run_dir / "run.log").read_text()
    return outcome


def _small(words: Sequence[str]) -> list[str]:
    """Smaller numbers; one engine without colocation, and evaluation at the end where a command evaluates."""
    engines = [] if "--colocate" in words else ["--rollout-num-gpus", "1"]
    return [*SMALL.split(), *engines, *(["--eval-interval", "2"] if "--eval-interval" in words else [])]


def check_rows(outcome: Outcome, staleness: int) -> None:
    assert [row["step"] for row in outcome.rows] == list(range(STEPS))
    assert max(row["lag/max"] for row in outcome.rows) <= staleness
    for row in outcome.rows:
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)


def test_the_complete_list_of_grpo_trains(tmp_path: Path) -> None:
    tensor_parallel = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
    outcome = trained(tmp_path, "complete-grpo", *tensor_parallel)
    check_rows(outcome, staleness=0)
    assert any(key.startswith("eval/") for key in outcome.rows[0])


def test_the_asynchronous_command_trains(tmp_path: Path) -> None:
    check_rows(trained(tmp_path, "asynchronous"), staleness=2)


def test_the_colocated_command_trains(tmp_path: Path) -> None:
    check_rows(trained(tmp_path, "colocated", "--tensor-model-parallel-size", "1"), staleness=0)


def test_the_multi_turn_command_trains(tmp_path: Path) -> None:
    outcome = trained(tmp_path, "turns", "--custom-generate-function-path", str(tmp_path / "custom_generate.py"))
    check_rows(outcome, staleness=0)
