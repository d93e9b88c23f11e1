"""Random histories of samples by length: a scheduler in a few lines, in steps instead of seconds."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.metrics.length_bias import LengthBias, LengthStats

GROUP_SIZE = 4
GROUPS_PER_STEP = 16
IN_FLIGHT = 48
"""Groups in flight: three steps of work."""
MEDIAN, LIMIT = 400.0, 6400
PACE = 400
"""Tokens that each sample generates between two steps."""


@dataclass(eq=False)
class Group:
    lengths: list[int]
    age: int = 0
    doom: int | None = None
    """The age at which the group fails, unless it ends first."""

    def __post_init__(self) -> None:
        self._longest = max(self.lengths)

    @property
    def is_done(self) -> bool:
        return self.age >= self._longest

    def reached(self) -> list[int]:
        """The tokens so far of each sample that is not done."""
        return [self.age for length in self.lengths if length > self.age]


def random_lengths(draw: random.Random, drift: float = 1.0, of_prompt: float = 0.5) -> list[int]:
    """Log-normal lengths, 95th percentile at 8 times the median; the prompt explains ``of_prompt`` of the variance."""
    sigma = 1.264  # log(8) / 1.645
    level = draw.gauss(0, sigma * of_prompt**0.5)
    return [
        min(LIMIT, max(1, round(MEDIAN * drift * math.exp(level + draw.gauss(0, sigma * (1 - of_prompt) ** 0.5)))))
        for _ in range(GROUP_SIZE)
    ]


@dataclass
class History:
    """Groups that grow, end, and are kept or filtered; ``is_lost(group)`` decides at each age whether one is lost."""

    seed: int
    is_lost: Callable[[random.Random, Group], bool] = lambda _draw, _group: False
    is_filtered: Callable[[random.Random, Group], bool] = lambda _draw, _group: False
    doom: Callable[[random.Random], int | None] = lambda _draw: None
    drift_per_step: float = 1.0
    of_prompt: float = 0.5
    started: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lengths = LengthBias(GROUP_SIZE)
        self._draw = random.Random(self.seed)
        self._flying: list[Group] = []
        self._ready: list[Group] = []
        self._step = 0

    def run(self, num_steps: int) -> list[LengthStats]:
        """The statistics after each step."""
        return [self._one_step() for _ in range(num_steps)]

    def _one_step(self) -> LengthStats:
        while len(self._ready) < GROUPS_PER_STEP:
            self._start()
            self._grow()
        batch, self._ready = self._ready[:GROUPS_PER_STEP], self._ready[GROUPS_PER_STEP:]
        for group in batch:
            for length in group.lengths:
                self.lengths.trained(length)
        self.lengths.close_step()
        self._step += 1
        return self.lengths.stats(age for group in self._flying for age in group.reached())

    def _start(self) -> None:
        while len(self._flying) + len(self._ready) < IN_FLIGHT:
            group = Group(
                random_lengths(self._draw, self.drift_per_step**self._step, self.of_prompt), doom=self.doom(self._draw)
            )
            self._flying.append(group)
            self.started += group.lengths

    def _grow(self) -> None:
        flying, self._flying = self._flying, []
        for group in flying:
            before, group.age = group.age, group.age + PACE // 8
            if group.doom is not None:
                group.age = min(group.age, group.doom)
            for length in group.lengths:
                if before < length <= group.age:
                    self.lengths.finished(length)
            is_done = group.is_done
            is_doomed = group.doom is not None and (is_done or group.age >= group.doom)
            if is_doomed or self.is_lost(self._draw, group):
                self._lose(group)
            elif is_done:
                self._end(group)
            else:
                self._flying.append(group)

    def _end(self, group: Group) -> None:
        if not self.is_filtered(self._draw, group):
            self._ready.append(group)
            return
        for length in group.lengths:
            self.lengths.filtered(length)

    def _lose(self, group: Group) -> None:
        for length in group.lengths:
            if length <= group.age:
                self.lengths.dropped(length)
            else:
                self.lengths.cut(group.age)
