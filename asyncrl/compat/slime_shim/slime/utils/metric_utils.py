"""The step of a metric, in slimes before 2026."""

from ..ray.rollout import compute_rollout_step

__all__ = ["compute_rollout_step"]
