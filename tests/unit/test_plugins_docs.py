"""The examples in docs/plugins.md load and run as they stand there."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from asyncrl.compat import SlimeArgs
from asyncrl.plugins import KEEP, PICK, REWARD, load_plugin
from tests.unit.scored_groups import group

DOCS = (Path(__file__).parents[2] / "docs/plugins.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCS, re.DOTALL))
COMMANDS = re.findall(r"^--([\w-]+) (?:'(.*)'|(\S+))$", DOCS, re.MULTILINE)
ARGS = SlimeArgs(rollout_max_response_len=5)
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
REWARDS = {"my_rewards.py:close_to(0.5)": (1.0, 0.0), "slime_rewards.py:short_and_right": (1.0, 0.0)}
PICKED = {
    "my_picks.py:most_uneven_first": (3, 2),
    "asyncrl.filters:Fresh(max_lag=1)": (0, 1),
    "slime_picks.py:newest_first": (2, 3),
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
    assert sorted(named_after("custom-rm-path")) == sorted(REWARDS)
    assert sorted(named_after("dynamic-sampling-filter-path")) == sorted(VERDICTS) == sorted(DULL)
    assert sorted(named_after("buffer-filter-path")) == sorted(PICKED)
    assert len(FILES) == DOCS.count("```python")


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("path", REWARDS)
def test_rewards(path: str) -> None:
    reward = load_plugin(path, REWARD, ARGS)
    given = [asyncio.run(reward(WAITING[0].prompt, scored.sample)) for scored in WAITING[0].samples]
    assert tuple(given) == REWARDS[path]


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
