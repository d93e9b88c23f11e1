"""User functions on the loop and in workers, with numbers, dicts and groups."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.app.rewards import build_reward
from asyncrl.app.user_code import UserCode
from asyncrl.compat import SlimeArgs
from asyncrl.config.areas import RewardConfig
from asyncrl.errors import RewardFailed, RewardKeyMissing, RewardUnavailable
from asyncrl.pipeline.sampling.scoring import score, score_group, time_limit
from asyncrl.protocols import GroupRewardFn, RewardFn
from asyncrl.rewards.resources import RewardResources
from asyncrl.types import Reward
from tests.unit.rewards.grading import in_a_run, prompt, sample

CODE = """
import asyncio
import os
import time

async def waits(prompt, sample): return {"right": float(sample.text == prompt.label), "length": len(sample.text)}
def computes(prompt, sample): return {"right": float(sample.text == prompt.label), "length": len(sample.text)}
def slimes(args, sample, **kwargs): return float(sample.response == sample.label) * args.lr
async def ranks(args, samples, **kwargs): return [float(index) for index, _ in enumerate(samples)]
def ranks_plain(prompt, samples): return [float(index) for index, _ in enumerate(samples)]
async def too_few(prompt, samples): return [1.0]
async def one_number(prompt, samples): return 1.0
def broken(prompt, sample): return [][sample.index]
async def broken_waits(prompt, sample): return [][sample.index]
def refused(prompt, sample): raise ConnectionRefusedError("no service")
async def refused_waits(prompt, sample): raise ConnectionResetError("cut")
async def exits(prompt, sample): os._exit(5)
async def sleeps(prompt, sample): await asyncio.sleep(60.0)
def endless(prompt, sample):
    while True: pass
"""
ARGS = SlimeArgs(lr=0.5)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(CODE)


async def graded(reward: RewardFn, name: str, texts: Sequence[str]) -> list[Reward | str]:
    samples = [sample(text, index) for index, text in enumerate(texts)]
    try:
        if isinstance(reward, GroupRewardFn):
            return list(await score_group(reward, prompt(), samples, 30.0))
        limit = time_limit(reward, 0.5 if name == "sleeps" else 30.0)
        return [await score(reward, prompt(), each, limit) for each in samples]
    except RewardKeyMissing as error:
        return [f"no key: {error}"]
    except RewardFailed as error:
        return [f"away: {error}" if isinstance(error, RewardUnavailable) else str(error)]


def by(name: str) -> str:
    return f"--custom-rm-path 'mine.py:{name}'"


@pytest.mark.timeout(360)
def test_functions() -> None:
    """One run for all, because each run starts worker processes."""

    calls: dict[str, tuple[str, str, dict[str, Any]]] = {
        "waits": ("waits", "7x", {"reward_key": "right"}),
        "computes": ("computes", "7x", {"reward_key": "right"}),
        "no key": ("computes", "7", {}),
        "no key, waits": ("waits", "7", {}),
        "slimes": ("slimes", "7x", {}),
        "ranks": ("ranks", "abc", {"group_rm": True}),
        "ranks_plain": ("ranks_plain", "abc", {"group_rm": True}),
        "too_few": ("too_few", "abc", {"group_rm": True}),
        "one_number": ("one_number", "abc", {"group_rm": True}),
        "broken": ("broken", "a", {}),
        "broken_waits": ("broken_waits", "a", {}),
        "refused": ("refused", "a", {}),
        "refused_waits": ("refused_waits", "a", {}),
        "exits": ("exits", "a", {}),
        "sleeps": ("sleeps", "a", {}),
        "endless": ("endless", "a", {}),
    }
    user_code = UserCode(start_timeout_s=60.0)
    rewards = {
        case: build_reward(RewardConfig(custom_rm_path=f"mine.py:{name}", **config), ARGS, user_code)
        for case, (name, _, config) in calls.items()
    }

    async def run(resources: RewardResources) -> dict[str, list[Reward | str]]:
        await resources.warm(rewards.values())
        return {case: await graded(rewards[case], name, texts) for case, (name, texts, _) in calls.items()}

    got = in_a_run(run, user_code, timeout_s=10.0)
    right, wrong = {"right": 1.0, "length": 1}, {"right": 0.0, "length": 1}
    assert got["waits"] == got["computes"] == [Reward(value=1.0, parts=right), Reward(value=0.0, parts=wrong)]
    line = "a dict reward with right, length: name one of them with --reward-key or --eval-reward-key"
    assert got["no key"] == [f"no key: row 3, sample 0: {by('computes')}: {line}"]
    assert got["no key, waits"] == [f"no key: row 3, sample 0: {by('waits')}: {line}"]
    assert got["exits"] == [f"row 3, sample 0: {by('exits')}: its process ended: exit code 5"]
    assert got["sleeps"] == [f"away: row 3, sample 0: {by('sleeps')}: no reward within 0.5 s"]
    assert got["slimes"] == [Reward(value=0.5), Reward(value=0.0)]
    assert got["ranks"] == got["ranks_plain"] == [Reward(value=0.0), Reward(value=1.0), Reward(value=2.0)]
    assert got["too_few"] == [f"row 3: {by('too_few')}: got 1 rewards for a group of 3 samples"]
    assert got["one_number"] == [f"row 3: {by('one_number')}: a list of rewards is needed, got a float: 1.0"]
    for case in ("broken", "broken_waits"):
        (text,) = got[case]
        start = f"row 3, sample 0: {by(case)}: IndexError: list index out of range (mine.py:"
        assert isinstance(text, str) and text.startswith(start) and text.endswith(f", in {case})")
    assert got["endless"] == [f"away: row 3, sample 0: {by('endless')}: no reward within 10 s; its worker was killed"]
    assert got["refused"] == [f"away: row 3, sample 0: {by('refused')}: ConnectionRefusedError: no service"]
    assert got["refused_waits"] == [f"away: row 3, sample 0: {by('refused_waits')}: ConnectionResetError: cut"]
