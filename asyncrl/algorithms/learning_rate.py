"""The learning rate of each training step: a linear warm-up, then a constant rate or a decay."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """The schedule of Megatron-core 0.18 (``OptimizerParamScheduler.get_lr``) in training steps, for three styles.

    Let W be the warm-up, D the end of the decay, s the step, and p = (s - W) / (D - W):

        s < W       lr (s + 1) / W
        W <= s <= D min_lr + (lr - min_lr) c(p), with c(p) = 1 - p (linear) or (cos(pi p) + 1) / 2 (cosine)
        s > D       min_lr

    Steps count from 0.  Megatron has s / W during the warm-up, so its first step has the rate 0 and changes nothing.
    With a ``first_step`` F, s - F and D - F take the places of s and D, and earlier steps have the rate of step F.
    """

    lr: float
    """The rate at the end of the warm-up."""
    style: Literal["constant", "cosine", "linear"] = "constant"
    min_lr: float = 0.0
    """The rate at the end of the decay; without meaning for ``constant``."""
    warmup_iters: int = 0
    """The number of training steps of the warm-up."""
    decay_iters: int = 0
    """The training step at which the decay ends, counted with the warm-up; without meaning for ``constant``."""
    first_step: int = 0
    """The first training step that uses the rate, and at which the warm-up begins."""

    def __post_init__(self) -> None:
        if self.style != "constant" and self.decay_iters <= self.first_step + self.warmup_iters:
            after = f"first_step {self.first_step} + " if self.first_step else ""
            raise ValueError(f"decay_iters {self.decay_iters} must be above {after}warmup_iters {self.warmup_iters}")

    def rate(self, step: int) -> float:
        """Return the learning rate of all optimizer updates in training step ``step``, counted from 0."""
        begin = self.first_step + self.warmup_iters
        if step < begin:
            return self.lr * (max(0, step - self.first_step) + 1) / max(1, self.warmup_iters)
        if self.style == "constant":
            return self.lr
        if step > self.decay_iters:
            return self.min_lr
        progress = (step - begin) / (self.decay_iters - begin)
        share = 1 - progress if self.style == "linear" else (math.cos(math.pi * progress) + 1) / 2
        return self.min_lr + share * (self.lr - self.min_lr)
