"""The step of a metric, under its name before 2026."""

from typing import Any

__all__ = ["compute_rollout_step"]


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """Return the step of W&B's axis: the training step, or with ``wandb_always_use_train_step`` its samples."""
    if getattr(args, "wandb_always_use_train_step", False):
        return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
    return rollout_id
