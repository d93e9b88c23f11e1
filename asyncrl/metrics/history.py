"""The summary of a run's rows that views and the closing table keep."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.metrics.sinks import Row
from asyncrl.metrics.words import share

type SetNumbers = Mapping[str, float]
"""Numbers of one held-out set by the last part of their metric's name: ``reward``, ``pass@4``, ..."""

_RECENT_STEPS = 40
"""Steps in the sparkline and in the estimate of the remaining time; 40 blocks fit a terminal of 80 columns."""


@dataclass(slots=True)
class History:
    """A sink of constant size that keeps sums and extremes of the rows written to it."""

    steps_before: int = 0
    """Steps of the run that this one resumes."""
    steps: int = 0
    last: Row = field(default_factory=dict)
    """Row of the last step."""
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    """Mean rewards of recent steps."""
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    """Seconds of each recent step."""
    first_reward: float | None = None
    last_reward: float | None = None
    first_held_out: tuple[int, float] | None = None
    """Training step of the weights, and their mean reward on held-out prompts."""
    last_held_out: tuple[int, float] | None = None
    first_sets: dict[str, SetNumbers] = field(default_factory=dict)
    """Numbers of each held-out set when it was first measured."""
    last_sets: dict[str, SetNumbers] = field(default_factory=dict)
    """Numbers of each held-out set in the last evaluation."""
    max_lag: int | None = None
    updates: int = 0
    pause_s: float = 0.0
    step_s: float = 0.0
    trainer_waited_s: float = 0.0
    engines_idle_s: float = 0.0
    generated: float = 0.0
    """Tokens generated in these steps; tokens from before a resume are not counted."""

    def write(self, row: Row, /) -> None:
        """Add one row."""
        self._remember_held_out(row)
        if "time/step_s" not in row:
            return  # a row with only an evaluation
        self.steps += 1
        self.last = row
        self._remember_reward(row)
        self._remember_lag(row)
        self._remember_times(row)

    def close(self) -> None:
        """Do nothing; there is nothing to release."""

    @property
    def mean_pause_s(self) -> float:
        """Mean seconds of pause per weight update."""
        return share(self.pause_s, self.updates)

    @property
    def trainer_waited(self) -> float:
        """Share of the time of all steps in which the trainer waited for a batch."""
        return share(self.trainer_waited_s, self.step_s)

    @property
    def engines_idle(self) -> float:
        """Share of the time of all steps without any sample in flight."""
        return share(self.engines_idle_s, self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second, over the time of all steps."""
        return share(self.generated, self.step_s)

    def _remember_held_out(self, row: Row) -> None:
        if "eval/accuracy" in row:
            self.last_held_out = (int(row["eval/step"]), row["eval/accuracy"])
            self.first_held_out = self.first_held_out or self.last_held_out
            self.last_sets = set_numbers(row)
            self.first_sets = self.last_sets | self.first_sets

    def _remember_reward(self, row: Row) -> None:
        if "reward/mean" in row:
            self.last_reward = row["reward/mean"]
            self.first_reward = self.last_reward if self.first_reward is None else self.first_reward
            self.rewards.append(self.last_reward)

    def _remember_lag(self, row: Row) -> None:
        if "lag/max" in row:
            self.max_lag = max(int(row["lag/max"]), self.max_lag or 0)

    def _remember_times(self, row: Row) -> None:
        self.recent_s.append(row["time/step_s"])
        self.step_s += row["time/step_s"]
        self.trainer_waited_s += row["time/trainer_waited_s"]
        self.engines_idle_s += row["time/engines_idle_s"]
        self.generated += row.get("throughput/tokens_generated_per_s", 0.0) * row["time/step_s"]
        if "time/update_pause_s" in row:
            self.updates += 1
            self.pause_s += row["time/update_pause_s"]


def set_numbers(row: Row) -> dict[str, SetNumbers]:
    """The numbers of each held-out set in ``row``, by the set's name, in the order of the row."""
    ending = "/reward"
    names = [name.removeprefix("eval/").removesuffix(ending) for name in row if name.startswith("eval/")]
    return {
        name: {
            number.removeprefix(f"eval/{name}/"): value
            for number, value in row.items()
            if number.startswith(f"eval/{name}/")
        }
        for name in names
        if f"eval/{name}{ending}" in row and not name.startswith("function/")
    }


def only_margin(history: History) -> float | None:
    """The margin of the last mean if there is one held-out set; the mean over several sets has none."""
    return next(iter(history.last_sets.values())).get("reward_ci95") if len(history.last_sets) == 1 else None
