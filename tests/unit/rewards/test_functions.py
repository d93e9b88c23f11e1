"""User functions on the loop and in workers, with numbers, dicts and groups."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.app.rewards import build_reward
from asyncrl.compat import SlimeArgs
from asyncrl.config.areas import RewardConfig
from asyncrl.errors import RewardFailed
from asyncrl.pipeline.sampling.scoring import score, score_group, time_limit
from asyncrl.protocols import GroupRewardFn
from asyncrl.rewards.resources import RewardResources
from asyncrl.types import Reward
from tests.unit.rewards.grading import in_a_run, prompt, sample

CODE = """
import time

async def waits(prompt, sample): return {"right": float(sample.text == prompt.label), "length": len(sample.text)}
def computes(prompt, sample): return {"right": float(sample.text == prompt.label), "length": len(sample.text)}
def slimes(args, sample, **kwargs): return float(sample.response == sample.label) * args.lr
async def ranks(args, samples, **kwargs): return [float(index) for index, _ in enumerate(samples)]
def ranks_plain(prompt, samples): return [float(index) for index, _ in enumerate(samples)]
async def too_few(prompt, samples): return [1.0]
async def one_number(prompt, samples): return 1.0
def broken(prompt, sample): return [][sample.index]
def endless(prompt, sample):
    while True: pass
"""
ARGS = SlimeArgs(lr=0.5)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(CODE)


async def graded(name: str, texts: Sequence[str], **config: Any) -> list[Reward | str]:
    reward = build_reward(RewardConfig(custom_rm_path=f"mine.py:{name}", **config), ARGS)
    samples = [sample(text, index) for index, text in enumerate(texts)]
    try:
        if isinstance(reward, GroupRewardFn):
            return list(await score_group(reward, prompt(), samples, 30.0))
        limit = time_limit(reward, 0.01 if name != "waits" else 30.0)
        return [await score(reward, prompt(), each, limit) for each in samples]
    except RewardFailed as error:
        return [str(error)]


@pytest.mark.timeout(120)
def test_functions() -> None:
    """One run for all, because each run starts worker processes."""

    async def run(resources: RewardResources) -> dict[str, list[Reward | str]]:
        return {
            "waits": await graded("waits", "7x", reward_key="right"),
            "computes": await graded("computes", "7x", reward_key="right"),
            "no key": await graded("computes", "7"),
            "slimes": await graded("slimes", "7x"),
            "ranks": await graded("ranks", "abc", group_rm=True),
            "ranks_plain": await graded("ranks_plain", "abc", group_rm=True),
            "too_few": await graded("too_few", "abc", group_rm=True),
            "one_number": await graded("one_number", "abc", group_rm=True),
            "broken": await graded("broken", "a"),
            "endless": await graded("endless", "a"),
        }

    got = in_a_run(run, timeout_s=10.0)
    right, wrong = {"right": 1.0, "length": 1}, {"right": 0.0, "length": 1}
    assert got["waits"] == got["computes"] == [Reward(value=1.0, parts=right), Reward(value=0.0, parts=wrong)]
    assert got["no key"] == ["row 3, sample 0: a dict reward with right, length: name one of them with --reward-key"]
    assert got["slimes"] == [Reward(value=0.5), Reward(value=0.0)]
    assert got["ranks"] == got["ranks_plain"] == [Reward(value=0.0), Reward(value=1.0), Reward(value=2.0)]
    assert got["too_few"] == ["row 3: got 1 rewards for a group of 3 samples"]
    assert got["one_number"] == ["row 3: a list of rewards is needed, got a float: 1.0"]
    assert got["broken"] == ["row 3, sample 0: IndexError: list index out of range"]
    assert got["endless"] == ["row 3, sample 0: no reward within 10 s; its worker was killed"]
