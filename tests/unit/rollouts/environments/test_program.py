"""Environment classes: what ``reset`` is asked for, what ``step`` returns, and the rewards of an episode."""

import threading
import time
from typing import Any

import pytest

from asyncrl.episodes import EpisodeEnd
from asyncrl.rollouts.environments.program import environment_program
from asyncrl.rollouts.testing import Played, play


class Guess:
    """Guess a number; each wrong guess costs 0.1."""

    opened: list["Guess"] = []  # noqa: RUF012 - the test looks at them

    def __init__(self) -> None:
        self.opened.append(self)
        self.is_closed = False

    def reset(self, metadata: dict[str, Any]) -> None:
        self.number = metadata["number"]

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.thread = threading.current_thread()
        guess = int(action)
        return "higher" if guess < self.number else "lower", self._reward(guess), guess == self.number, {"last": guess}

    def _reward(self, guess: int) -> float:
        return 1.0 if guess == self.number else -0.1

    def close(self) -> None:
        self.is_closed = True


def played(environment: Any, *answers: str, **options: Any) -> Played:
    settings = {name: options.pop(name) for name in ("chat", "turn_rewards") if name in options}
    program = environment_program(environment, **settings)
    return play(program, **{"prompt": "Guess: ", "answers": answers, "metadata": {"number": 7}} | options)


def reward_of(played: Played) -> float:
    [trajectory] = played.trajectories
    assert trajectory.reward is not None
    return trajectory.reward.value


def test_reward_is_the_sum_and_the_turns_alternate_with_observations() -> None:
    result = played(Guess, "3", "9", "7")
    assert reward_of(result) == pytest.approx(0.8)
    assert result.seen[1] == "Guess: 3<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    [trajectory] = result.trajectories
    assert sum(trajectory.loss_mask) == 3
    assert trajectory.sample.metadata == {"last": 7}
    assert [turn.reward for turn in trajectory.sample.turns] == [None, None, None]
    assert result.metrics["episodes/tool_calls"] == 3


def test_each_turn_may_keep_its_reward() -> None:
    [trajectory] = played(Guess, "3", "7", turn_rewards=True).trajectories
    assert [turn.reward for turn in trajectory.sample.turns] == [-0.1, 1.0]


def test_text_is_appended_as_it_is_without_a_chat_template() -> None:
    assert played(Guess, "3", "7", chat=False).seen[1] == "Guess: 3higher"


def test_steps_run_in_a_thread_and_the_environment_is_closed() -> None:
    played(Guess, "7")
    assert Guess.opened[-1].thread is not threading.main_thread()
    assert Guess.opened[-1].is_closed


def test_last_turn_is_stepped_and_ends_the_episode() -> None:
    result = played(Guess, "3", "4", max_turns=2)
    assert reward_of(result) == pytest.approx(-0.2)
    assert result.end is EpisodeEnd.FINISHED


def test_full_context_ends_the_episode_with_the_reward_so_far_and_closes_the_environment() -> None:
    result = played(Guess, "3", "7", max_context_len=20)
    assert result.end is EpisodeEnd.CONTEXT_FULL
    assert reward_of(result) == pytest.approx(-0.1)
    assert Guess.opened[-1].is_closed


class Maze:
    """An environment in gymnasium's shape, on the event loop."""

    async def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.left = options["number"]
        return "You are in a maze.", {"seed": seed}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return f"{self.left} left", 0.0, False, self.left == 5, {"reward": 0.25 * len(action)}


def test_gymnasium_values_are_taken_and_the_first_observation_is_the_prompt() -> None:
    result = played(Maze, "n", "ss")
    assert result.seen[0] == "<|im_start|>user\nYou are in a maze.<|im_end|>\n<|im_start|>assistant\n"
    assert reward_of(result) == 0.5
    assert result.trajectories[0].sample.metadata == played(Maze, "n", "ss").trajectories[0].sample.metadata
    assert isinstance(result.trajectories[0].sample.metadata["seed"], int)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((1, 2), r"Wrong\.step must return \(observation, reward, done, info\), got \(1, 2\)"),
        (("x", None, True, {}), r"Wrong\.step must return a number as the reward, got None"),
    ],
)
def test_wrong_result_of_a_step_names_the_class(result: Any, message: str) -> None:
    class Wrong(Guess):
        def step(self, action: str) -> Any:
            return result

    with pytest.raises(TypeError, match=message):
        played(Wrong, "7")


def test_late_step_costs_its_trajectory_and_closes_the_environment() -> None:
    class Slow(Guess):
        def step(self, action: str) -> Any:
            time.sleep(1.5)

    result = played(Slow, "7", tool_timeout_s=1.0)  # of ``reset``, too, whose thread may begin late
    assert result.end is EpisodeEnd.TOOL_FAILED
    assert sum(result.trajectories[0].loss_mask) == 0
    assert Guess.opened[-1].is_closed
