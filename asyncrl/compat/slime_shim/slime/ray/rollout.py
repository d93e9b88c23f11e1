"""The step of a metric."""

from ..utils.metric_utils import compute_rollout_step

__all__ = ["compute_rollout_step"]
