"""Every user function of slime's shape gets the same ``args``, which hold what slime's hold."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.app.checks import Checked, check
from asyncrl.types import Batch
from tests.unit.app.test_checks import quickstart
from tests.unit.scored_groups import group

FUNCTIONS = """
from asyncrl.compat import DynamicFilterOutput, RolloutFnEvalOutput, Sample

SEEN = {}

def keep(args, samples, **kwargs):
    SEEN["keep"] = args
    return DynamicFilterOutput(keep=True)

def pick(args, rollout_id, buffer, num_samples):
    SEEN["pick"] = args
    taken, buffer[:] = buffer[:num_samples], buffer[num_samples:]
    return taken

def leave_out(args, groups):
    SEEN["leave_out"] = args

def look(args, groups, source):
    SEEN["look"] = args

def post_process(args, samples):
    SEEN["post_process"] = args
    rewards = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator in ["grpo", "gspo"] and args.rewards_normalization:
        mean = sum(rewards) / len(rewards)
        std = (sum((each - mean) ** 2 for each in rewards) / (len(rewards) - 1)) ** 0.5
        return rewards, [(each - mean) / (std + 1e-6) if args.grpo_std_normalization else each - mean
                         for each in rewards]
    return rewards, rewards

def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    SEEN["log"] = args

def evaluate(args, rollout_id, data_source, evaluation=False):
    SEEN["evaluate"] = args
    return RolloutFnEvalOutput(data={})

class Source:
    def __init__(self, args):
        SEEN["source"] = self.args = args

    def get_samples(self, num_samples):
        return [[Sample(prompt="1+1=")] for _ in range(num_samples)]
"""
FLAGS = {
    "dynamic-sampling-filter-path": "keep",
    "buffer-filter-path": "pick",
    "rollout-sample-filter-path": "leave_out",
    "rollout-all-samples-process-path": "look",
    "custom-reward-post-process-path": "post_process",
    "custom-rollout-log-function-path": "log",
    "eval-function-path": "evaluate",
    "data-source-path": "Source",
}


def checked_with(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[Checked, dict[str, Any]]:
    """Return the run with all functions, and the ``args`` that they saw."""
    (folder / "seeing_args.py").write_text(FUNCTIONS)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "seeing_args", raising=False)
    named = [word for flag, name in FLAGS.items() for word in (f"--{flag}", f"seeing_args.{name}")]
    checked = check(quickstart(*named, *flags))
    seen: dict[str, Any] = importlib.import_module("seeing_args").SEEN
    return checked, seen


def call_all(checked: Checked) -> Batch:
    """Call every function, and return the batch behind the hooks."""
    scored = group(3, (0.0, 1.0))
    checked.keep(scored)
    assert checked.pick is not None and checked.hooks.rollout_log is not None
    checked.pick(0, [scored], 1)
    batch = Batch(step=0, groups=(scored,))
    for each in checked.hooks.before_training:
        batch = each.hook(batch, ())
    checked.hooks.rollout_log(0, batch, {})
    evaluate: Any = checked.eval_function
    evaluate(0, {})
    return batch


def test_all_functions_get_the_same_complete_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, seen = checked_with(tmp_path, monkeypatch)
    try:
        call_all(checked)
    finally:
        checked.user_code.close()
    assert seen.keys() == {*FLAGS.values()} - {"Source"} | {"source"}
    first = vars(seen["keep"])
    assert {name: vars(args) == first for name, args in seen.items()} == dict.fromkeys(seen, True)
    assert (first["rewards_normalization"], first["rollout_global_dataset"], first["ci_test"]) == (True, True, False)


@pytest.mark.parametrize(("flags", "expected"), [((), 0.707106), (("--disable-grpo-std-normalization",), 0.5)])
def test_a_copy_of_slimes_reward_post_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: float
) -> None:
    checked, _ = checked_with(tmp_path, monkeypatch, *flags)
    try:
        batch = call_all(checked)
    finally:
        checked.user_code.close()
    assert [each.outcome for each in batch.groups[0].samples] == pytest.approx([-expected, expected], abs=1e-5)
