"""Advantages and losses by path are found and checked, and slime's shape is translated."""

import pickle
import sys
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms.custom_functions import Custom, StepSamples
from asyncrl.compat import SlimeArgs
from asyncrl.config import load_run
from asyncrl.errors import PluginError
from asyncrl.plugins import ADVANTAGE, LOSS, load_custom, load_plugin
from tests.unit.config.runs import complaints, complete, load

ARGS = SlimeArgs(kl_coef=0.5)
CODE = """
def ours(samples): return samples.rewards_N
def scaled(factor):
    def advantage(samples): return factor * samples.rewards_N
    return advantage
def slimes(args, rollout_data):
    found = []
    for reward, raw, kl, mask, length in zip(
        *(rollout_data[key] for key in ("rewards", "raw_reward", "kl", "loss_masks", "response_lengths"))
    ):
        assert len(kl) == len(mask) == length
        found.append(reward + 10 * raw - args.kl_coef * kl * mask)
    rollout_data["advantages"] = rollout_data["returns"] = found
def slimes_without(args, rollout_data): rollout_data["returns"] = []
def slimes_teacher(args, rollout_data): rollout_data["teacher_log_probs"]
def two(samples, more): ...
async def waits(samples): ...

def loss(logprobs, old_logprobs, advantages, mask, lengths): ...
def slimes_loss(args, batch, logits, sum_of_sample_mean): ...
def short(logprobs, old_logprobs): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def samples(**changes: Any) -> StepSamples:
    rows = (torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    given = {
        "step": 3,
        "rewards_N": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "groups_N": torch.tensor([0, 0]),
        "rollouts_N": torch.tensor([0, 1]),
        "turns": tuple(torch.zeros(len(row), dtype=torch.long) for row in rows),
        "turn_rewards": (torch.tensor([torch.nan]),) * 2,
        "outcomes_N": torch.tensor([0.5, -0.5], dtype=torch.float64),
        "token_ids": (torch.tensor([1, 2, 3]), torch.tensor([1])),
        "masks": tuple(torch.ones(len(row), dtype=torch.bool) for row in rows),
        "behaviour_logprobs": rows,
        "proximal_logprobs": rows,
        "ref_logprobs": None,
        "kl": None,
    }
    return StepSamples(**{**given, **changes})


@pytest.mark.usefixtures("here")
def test_native_advantages_and_losses_load() -> None:
    assert load_plugin("mine.py:ours", ADVANTAGE, ARGS)(samples()).tolist() == [1.0, 0.0]  # type: ignore[union-attr]
    assert load_plugin("mine:scaled(2.0)", ADVANTAGE, ARGS)(samples()).tolist() == [2.0, 0.0]  # type: ignore[union-attr]
    loss = load_plugin("mine.loss", LOSS, ARGS)
    assert isfunction(loss)
    assert loss.__name__ == "loss"


@pytest.mark.usefixtures("here")
def test_slime_s_advantages_get_its_names_and_give_what_they_set() -> None:
    function = load_plugin("mine.py:slimes", ADVANTAGE, ARGS)
    first, second = function(samples())
    assert (first.tolist(), second.tolist()) == ([10.5, 10.5], [])
    rows = (torch.tensor([-1.5, -2.0]), torch.zeros(0))
    kl = (torch.tensor([0.5, 0.0]), torch.zeros(0))
    first, _ = function(samples(ref_logprobs=rows, kl=kl))
    assert first.tolist() == [10.25, 10.5]


@pytest.mark.usefixtures("here")
def test_mistakes_in_slimes_shape_are_named() -> None:
    with pytest.raises(ValueError, match=r"slimes_without must set rollout_data\['advantages'\]"):
        load_plugin("mine.py:slimes_without", ADVANTAGE, ARGS)(samples())
    with pytest.raises(KeyError, match="'teacher_log_probs' is not in rollout_data, which has: tokens, total_lengths"):
        load_plugin("mine.py:slimes_teacher", ADVANTAGE, ARGS)(samples())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("kind", "name", "line"),
    [
        (ADVANTAGE, "two", "must take (samples) or slime's (args, rollout_data, **kwargs), takes (samples, more)"),
        (ADVANTAGE, "waits", "must be written with 'def', not 'async def'"),
        (
            LOSS,
            "short",
            "must take (logprobs, old_logprobs, advantages, mask, lengths), takes (logprobs, old_logprobs)",
        ),
        (
            LOSS,
            "slimes_loss",
            "has slime's signature (args, batch, logits, sum_of_sample_mean), but logits of the whole vocabulary never "
            "exist here; write loss(logprobs, old_logprobs, advantages, mask, lengths), which returns a loss per token "
            "and a dict of metrics",
        ),
    ],
)
def test_other_shapes_are_refused_in_one_line(kind: Any, name: str, line: str) -> None:
    with pytest.raises(PluginError) as error:
        load_plugin(f"mine.py:{name}", kind, ARGS)
    assert str(error.value) == f"{kind.flag} 'mine.py:{name}': {line}"


def test_another_process_finds_them_wherever_it_runs(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = partial(load_custom, "mine_elsewhere:ours", f"{here}/mine.py:loss", ARGS, here)
    (here / "mine_elsewhere.py").write_text(CODE)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(here)])
    custom = pickle.loads(pickle.dumps(resolve))()
    assert (custom.advantage.__name__, custom.loss.__name__) == ("ours", "loss")
    assert load_custom(None, None, ARGS, here) == Custom()


def test_paths_start_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--custom-advantage-function-path", "a.py:f('x:y')", "--buffer-filter-path", "b/c.py:g"]
    run = load_run([*complete(tmp_path), *flags, "--custom-loss-function-path", "package:f('z.py:h')"])
    assert run.train.custom_advantage_function_path == f"{tmp_path}/a.py:f('x:y')"
    assert run.rollout.buffer_filter_path == f"{tmp_path}/b/c.py:g"
    assert run.train.custom_loss_function_path == "package:f('z.py:h')"


ADVANTAGE_PATH, LOSS_PATH = ("--custom-advantage-function-path", "a.py:f"), ("--custom-loss-function-path", "a.py:f")


def test_a_custom_advantage_needs_no_second_answer_and_may_use_a_kl(tmp_path: Path) -> None:
    run = load(tmp_path, *ADVANTAGE_PATH, "--n-samples-per-prompt", "1", "--kl-coef", "0.1")
    assert (run.rollout.n_samples_per_prompt, run.train.kl_coef) == (1, 0.1)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            [*ADVANTAGE_PATH, "--advantage-estimator", "ppo"],
            "custom-advantage-function-path with advantage-estimator ppo, whose critic learns from ppo's returns; give "
            "another estimator",
        ),
        (
            [*LOSS_PATH, "--eps-clip", "0.1", "--eps-clip-c", "3"],
            "eps-clip, eps-clip-c with custom-loss-function-path, which replaces the clipping: give them as its "
            "arguments, file.py:name(0.2)",
        ),
    ],
)
def test_flags_that_would_be_ignored_are_refused(tmp_path: Path, flags: list[str], line: str) -> None:
    assert complaints(*complete(tmp_path), *flags) == [line]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--rotary-percent", "1.5"], "rotary-percent must be above 0 and at most 1, got 1.5"),
        (["--num-layers", "0"], "num-layers must be at least 1, got 0"),
        (["--norm-epsilon", "0"], "norm-epsilon must be above 0, got 0.0"),
    ],
)
def test_shape_flags_have_ranges(tmp_path: Path, flags: list[str], line: str) -> None:
    assert complaints(*complete(tmp_path), *flags) == [line]
