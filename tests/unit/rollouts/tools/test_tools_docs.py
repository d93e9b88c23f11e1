"""The examples in docs/guides/tools.md, with answers as engines give them: they end with the model's end token."""

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.episodes import EpisodeEnd
from asyncrl.rollouts.environments.program import environment_program
from asyncrl.rollouts.testing import END, play

PAGE = (Path(__file__).parents[4] / "docs/guides/tools.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)[^\n]*\n(.*?)```", PAGE, re.DOTALL))
CALL = '<tool_call>{"name": "multiply", "arguments": {"first": 6, "second": 7}}</tool_call>'


def names_of(file: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(FILES[file], names)
    return names


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("142", 0.0)])
def test_the_loop_of_tool_calls_rewards_the_right_answer(answer: str, reward: float) -> None:
    episode = names_of("my_episode.py")["episode"]
    (found,) = play(episode, prompt="6*7", answers=[CALL + END, answer + END], label="42").trajectories
    assert found.reward is not None
    assert found.reward.value == reward


def test_the_environment_reads_guesses() -> None:
    program = environment_program(names_of("guess.py")["Guess"])
    answers = [f"3{END}", f"I pass.{END}", f"7{END}"]
    played = play(program, prompt="Guess: ", answers=answers, metadata={"number": 7})
    (found,) = played.trajectories
    assert (played.end, len(found.sample.turns)) == (EpisodeEnd.FINISHED, 3)
    assert found.reward is not None
    assert found.reward.value == 1.0
