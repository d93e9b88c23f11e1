"""The programs of user code: an environment class becomes an episode."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncrl.app.user_programs import EpisodeTask, check_episode, episode_program
from asyncrl.compat import SlimeArgs
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.episodes import EpisodeStart, GeneratedTurn
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.session import Verdict
from asyncrl.rollouts.testing import ScriptedTurns
from asyncrl.types import Prompt, SamplingParams

CHECKPOINT = Path(__file__).parents[3] / "configs" / "quickstart" / "model"
ENVIRONMENT = """
class Once:
    def __init__(self, reward=1.0):
        self.reward = reward

    def reset(self):
        return None

    def step(self, action):
        return "", self.reward, True, {"action": action}
"""


@dataclass(frozen=True, kw_only=True)
class Call:
    """An episode whose model gives scripted answers."""

    start: EpisodeStart
    turns: ScriptedTurns
    address: EpisodeAddress = EpisodeAddress(host="127.0.0.1", port=9, key="k", secret="")  # noqa: RUF009

    async def generate(self, token_ids: tuple[int, ...], *further: Any, **names: Any) -> GeneratedTurn:
        return await self.turns.generate(token_ids, self.start.sampling)


def test_environment_class_is_played_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "once.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    path = "once.py:Once(reward=0.5)"
    assert check_episode(path, tmp_path).facts == {"shape": "environment"}
    program = episode_program(
        EpisodeTask(
            path=path,
            args=SlimeArgs(),
            folder=tmp_path,
            checkpoint=CHECKPOINT,
            tool_timeout_s=5.0,
            max_turns=None,
            reward_keys={},
        )
    )
    start = EpisodeStart(
        name="0.0",
        prompt=Prompt(row=0, epoch=0, text="1+1=", token_ids=(3,), label=None),
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=9),
        index=0,
        group_size=1,
        seed=0,
    )
    turns = ScriptedTurns(iter(["2"]), load_tokenizer(CHECKPOINT))
    verdict = asyncio.run(_run(program, Call(start=start, turns=turns)))
    assert (verdict.rewards[0].value, verdict.metadata) == (0.5, {"action": "2"})


async def _run(program: Any, call: Call) -> Verdict:
    found = await program(call)
    assert isinstance(found, Verdict)
    return found
