"""The examples in docs/plugins.md load and run as they are printed."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.algorithms.custom_functions import StepSamples
from asyncrl.algorithms.losses import rollout_weights
from asyncrl.compat import SlimeArgs
from asyncrl.plugins import ADVANTAGE, KEEP, LOSS, PICK, load_custom, load_plugin
from tests.unit.scored_groups import group

DOCS = (Path(__file__).parents[3] / "docs/plugins.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCS, re.DOTALL))
COMMANDS = re.findall(r"^--([\w-]+) (?:'(.*)'|(\S+))$", DOCS, re.MULTILINE)
ARGS = SlimeArgs(rollout_max_response_len=5, kl_coef=0.5, tis_clip=2.0)
WAITING = [group(number, (0.0, number / 4), (3, 3), texts=("7", "8"), label="7") for number in range(4)]

VERDICTS = {
    "my_filters.py:useful": None,
    "my_filters.py:NoRepeats(max_share=0.5)": None,
    'asyncrl.filters:LengthBounds(high=4096, of="longest")': None,
    "asyncrl.filters:RewardBounds(low=0.1, high=0.9)": None,
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": None,
    "slime_filters.py:some_right": None,
}
DULL = {
    "my_filters.py:useful": "zero_std_0.0",
    "my_filters.py:NoRepeats(max_share=0.5)": "repeats",
    'asyncrl.filters:LengthBounds(high=4096, of="longest")': None,
    "asyncrl.filters:RewardBounds(low=0.1, high=0.9)": "reward_below_0.1",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "zero_std_0.0",
    "slime_filters.py:some_right": "none_right",
}
PICKED = {
    "my_picks.py:most_uneven_first": (3, 2),
    "asyncrl.filters:Fresh(max_lag=1)": (0, 1),
    "slime_picks.py:newest_first": (2, 3),
}
ADVANTAGES = {
    "my_advantages.py:by_length(2048)": ([0.5, 0.5], [-0.5]),
    "slime_advantages.py:less_kl": ([0.25, 1.0], [-1.0]),
}
CORRECTIONS: dict[str, tuple[list[float], list[int], dict[str, list[float]]]] = {
    "my_corrections.py:within(0.5, 2.0)": ([2.0, 4.0], [True, False], {"ratio": [1.0, 4.0]}),
    "slime_corrections.py:truncated": ([2.0, 2.0], [1, 1], {"weight": [1.0, 2.0]}),
}
LOSSES = {
    "my_losses.py:quadratic(0.5)": ([-1.0, 1.0], {"distance": [0.0, 0.0]}),
    "my_losses.py:constant_divisor(1000)": ([pytest.approx(-0.002), pytest.approx(0.002)], {"clip_fraction": [0, 0]}),
}


def named_after(flag: str) -> list[str]:
    return [quoted or plain for name, quoted, plain in COMMANDS if name == flag]


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)


def test_every_example_is_tested() -> None:
    assert sorted(set(named_after("dynamic-sampling-filter-path"))) == sorted(VERDICTS) == sorted(DULL)
    assert sorted(named_after("buffer-filter-path")) == sorted(PICKED)
    assert sorted(named_after("custom-advantage-function-path")) == sorted(ADVANTAGES)
    assert sorted(named_after("custom-loss-function-path")) == sorted(LOSSES)
    assert sorted(named_after("custom-tis-function-path")) == sorted(CORRECTIONS)
    assert len(FILES) == DOCS.count("```python")


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("path", VERDICTS)
def test_filters(path: str) -> None:
    keep = load_plugin(path, KEEP, ARGS)
    assert keep(WAITING[2]) == VERDICTS[path]
    assert keep(group(9, (0.0, 0.0), (3, 3), texts=("7", "7"))) == DULL[path]


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("path", PICKED)
def test_buffer_filters(path: str) -> None:
    assert load_plugin(path, PICK, ARGS)(1, WAITING, 2).train == PICKED[path]


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("path", ADVANTAGES)
def test_advantages(path: str) -> None:
    rows = (torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.0]).double())
    samples = StepSamples(
        step=0,
        rewards_N=torch.tensor([1.0, 0.0]),
        groups_N=torch.tensor([3, 3]),
        rollouts_N=torch.tensor([0, 1]),
        turns=tuple(torch.zeros(len(row), dtype=torch.long) for row in rows),
        turn_rewards=(torch.tensor([torch.nan]),) * 2,
        outcomes_N=torch.tensor([1.0, -1.0]),
        token_ids=(torch.tensor([1, 2, 3]), torch.tensor([1, 2])),
        masks=tuple(torch.ones(len(row), dtype=torch.bool) for row in rows),
        behaviour_logprobs=rows,
        proximal_logprobs=rows,
        ref_logprobs=rows,
        kl=(torch.tensor([1.5, 0.0]), torch.tensor([0.0])),
    )
    assert tuple(row.tolist() for row in load_plugin(path, ADVANTAGE, ARGS)(samples)) == ADVANTAGES[path]


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("path", LOSSES)
def test_losses(path: str) -> None:
    logprobs, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0])
    loss, told = load_plugin(path, LOSS, ARGS)(logprobs, logprobs, advantages, torch.tensor([True, True]), (2,))
    assert (loss.tolist(), {name: row.tolist() for name, row in told.items()}) == LOSSES[path]


@pytest.mark.usefixtures("_files")
def test_a_constant_divisor_cancels_the_mean_over_an_answer() -> None:
    loss = load_plugin("my_losses.py:constant_divisor(1000)", LOSS, ARGS)
    mask, lengths = torch.tensor([True, True, False, True, True]), (1, 4)
    logprobs, advantages = torch.zeros(5), torch.tensor([2.0, 3.0, 9.0, 3.0, 3.0])
    losses, _ = loss(logprobs, logprobs, advantages, mask, lengths)
    weights = rollout_weights(mask, lengths, rollout_tokens=(1, 3))
    assert (losses * weights).sum().item() == pytest.approx(-(2.0 + 3.0 * 3) / 1000)


@pytest.fixture
def _no_slime() -> Iterator[None]:
    """No shim is left behind."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_files", "_no_slime")
@pytest.mark.parametrize("path", CORRECTIONS)
def test_corrections(path: str, tmp_path: Path) -> None:
    correct = load_custom(None, None, ARGS, tmp_path, path).tis
    assert correct is not None
    losses, ratios = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 4.0])
    mask = torch.tensor([True, True])
    found, kept, told = correct(losses, ratios.log(), torch.zeros(2), mask, (2,), (3,))
    kept = torch.cat(list(kept)) if isinstance(kept, list) else kept
    assert isinstance(kept, torch.Tensor)
    losses_after, is_kept, numbers = CORRECTIONS[path]
    assert (found.tolist(), kept.tolist()) == (losses_after, is_kept)
    assert {name: row.tolist() for name, row in told.items()} == {n: pytest.approx(row) for n, row in numbers.items()}
