"""The examples in docs/rewards.md load and run as they are printed."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.app.rewards import build_reward
from asyncrl.app.user_code import UserCode
from asyncrl.compat import SlimeArgs
from asyncrl.config.areas import RewardConfig
from asyncrl.config.areas.rewards import RM_TYPES
from asyncrl.protocols import GroupRewardFn, RewardFn
from asyncrl.rewards.resources import RewardResources
from asyncrl.types import Reward
from tests.unit.rewards.grading import in_a_run, prompt, sample

DOCS = (Path(__file__).parents[3] / "docs/rewards.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCS, re.DOTALL))
COMMANDS = re.findall(r"^((?:--[\w-]+ ?\w* )*)--custom-rm-path (?:'(.*)'|\"(.*)\"|(\S+))$", DOCS, re.MULTILINE)
ARGS = SlimeArgs(rollout_max_response_len=5)
ANSWERS = ("7", "reward")

EXPECTED = {
    "my_rewards.py:exact": [1.0, 0.0],
    "my_rewards.py:close_to(0.5)": [1.0, 0.0],
    "slime_rewards.py:short_and_right": [1.0, 0.0],
    "my_parts.py:parts": [1.1, 0.1 / 6],
    "my_ranks.py:shortest_first": [1.0, 0.5],
    "my_model.py:CustomRewardModel('models/reward')": [0.0, 1.0],
}


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)


def config(flags: str, path: str) -> RewardConfig:
    words = flags.split()
    given: dict[str, Any] = {"group_rm": True} if "--group-rm" in words else {}
    if "--reward-key" in words:
        given["reward_key"] = words[words.index("--reward-key") + 1]
    return RewardConfig(custom_rm_path=path, **given)


def number(reward: float | Reward) -> float:
    return reward.value if isinstance(reward, Reward) else reward


def test_every_example_is_tested() -> None:
    assert sorted(next(filter(None, paths)) for _, *paths in COMMANDS) == sorted(EXPECTED)
    assert len(FILES) == DOCS.count("```python")
    assert len(COMMANDS) == DOCS.count("--custom-rm-path my_") + DOCS.count("--custom-rm-path slime_") + 2


def test_examples_that_read_the_whole_text_leave_its_end_token_out() -> None:
    whole = {path for flags, *paths in COMMANDS for path in paths if "--rollout-skip-special-tokens" in flags} - {""}
    assert {path.partition(":")[0] for path in whole} == {name for name, code in FILES.items() if "label" in code}


def test_the_table_has_every_built_in_reward() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", DOCS.partition("## Built-in rewards")[2], re.MULTILINE)
    assert set(RM_TYPES) <= set(rows)


@pytest.mark.usefixtures("_files")
@pytest.mark.timeout(360)
def test_the_examples_give_their_rewards() -> None:
    """One run for all examples, because each run starts worker processes."""

    user_code = UserCode(start_timeout_s=60.0)
    named = [(flags, next(filter(None, paths))) for flags, *paths in COMMANDS]
    rewards = {path: build_reward(config(flags, path), ARGS, user_code) for flags, path in named}

    async def grade(reward: RewardFn) -> list[float]:
        samples = [sample(text, index) for index, text in enumerate(ANSWERS)]
        if isinstance(reward, GroupRewardFn):
            return [number(each) for each in await reward.of_group(prompt(), samples)]
        return [number(value) for each in samples for value in [await reward(prompt(), each)]]

    async def run(_: RewardResources) -> dict[str, list[float]]:
        return {path: await grade(reward) for path, reward in rewards.items()}

    got = in_a_run(run, user_code)
    assert got == {path: pytest.approx(values) for path, values in EXPECTED.items()}
