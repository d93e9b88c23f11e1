"""A data source that moves to harder rows when the rewards at the present level are good.

A problem is a sum, ``347+3=``.  Its second number is the number of steps in the answer, and so its level.
"""

import json
import random
from pathlib import Path
from typing import Any

from asyncrl.types import NewPrompt, ScoredGroup

LEVELS = (range(1, 3), range(3, 6), range(6, 10))
"""Second numbers of the problems of each level."""
ABOVE = 0.8
"""Mean reward above which the next level begins."""
OLD_SHARE = 0.2
"""Share of the problems that repeat an earlier level, so that it is not forgotten."""
WEIGHT = 0.05
"""Weight of one group in the running mean of the rewards."""


class Curriculum:
    """Draw rows of ``--prompt-data`` from the present level, which rises when its mean reward is above a limit."""

    def __init__(self, args: Any) -> None:
        """``args`` has an attribute for every flag of the run."""
        self._rows = by_level(Path(args.prompt_data))
        self._seed = args.seed
        self._taken = 0
        self._level = 0
        self._mean = 0.0

    def take(self) -> NewPrompt:
        """Return the next problem."""
        draw = random.Random(f"{self._seed} {self._taken}")  # the same after a resume
        is_old = self._level > 0 and draw.random() < OLD_SHARE
        level = draw.randrange(self._level) if is_old else self._level
        row = draw.choice(self._rows[level])
        self._taken += 1
        return NewPrompt(prompt=row["prompt"], label=row["label"], metadata={"level": level})

    def finished(self, group: ScoredGroup) -> None:
        """Count the rewards of a group of the present level."""
        if group.prompt.metadata["level"] != self._level:
            return
        reward = sum(scored.reward for scored in group.samples) / len(group.samples)
        self._mean += WEIGHT * (reward - self._mean)
        if self._mean > ABOVE and self._level < len(LEVELS) - 1:
            self._level, self._mean = self._level + 1, 0.0

    def state(self) -> Any:
        """Return the state for a checkpoint."""
        return [self._taken, self._level, self._mean]

    def load(self, state: Any) -> None:
        """Continue from a checkpoint."""
        self._taken, self._level, self._mean = state


def by_level(path: Path) -> list[list[dict[str, str]]]:
    """Return the rows of a file of problems by level."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [[row for row in rows if num_steps(row["prompt"]) in level] for level in LEVELS]


def num_steps(problem: str) -> int:
    """Return the second number of a problem."""
    return int(problem.rstrip("=").partition("+")[2])
