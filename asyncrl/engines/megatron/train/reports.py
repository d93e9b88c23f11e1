"""Reports and metrics of a training step."""

from collections.abc import Sequence
from statistics import fmean

import torch

from asyncrl.engines.megatron.train.learner import Gradients
from asyncrl.types import TrainReport


def report(
    updates: Sequence[Gradients],
    told: dict[str, float],
    learning_rate: float,
    seconds: float,
    logprobs: tuple[Sequence[float], ...],
    advantages: tuple[Sequence[float], ...],
) -> TrainReport:
    """Assemble a step's report: losses and norms are means over updates, other numbers means over trained tokens."""
    means = _means(updates)
    return TrainReport(
        loss=fmean(update.loss for update in updates),
        grad_norm=fmean(update.norm for update in updates),
        clip_fraction=means.pop("train/clip_fraction"),
        entropy=means.pop("train/entropy"),
        learning_rate=learning_rate,
        seconds=seconds,
        logprobs=logprobs,
        advantages=advantages,
        metrics=told | means,
    )


def critic_metrics(updates: Sequence[Gradients]) -> dict[str, float]:
    """Compute the metrics of the critic's updates in a step; none without updates."""
    if not updates:
        return {}
    return _means(updates) | {"train/critic_grad_norm": fmean(update.norm for update in updates)}


def forget_peak(device: torch.device) -> None:
    """Reset the peak that ``memory_metrics`` reports."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the GPU's peak memory since ``forget_peak``, in units of 10^9 bytes; nothing for a CPU."""
    if device.type == "cpu":
        return {}
    return {"train/peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9}


def _means(updates: Sequence[Gradients]) -> dict[str, float]:
    """Compute means over the trained tokens of all updates."""
    num_tokens = max(1, sum(update.num_tokens for update in updates))
    return {name: sum(update.sums[name] for update in updates) / num_tokens for name in updates[0].sums}
