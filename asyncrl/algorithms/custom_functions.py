"""The interfaces of a user's functions of the objective, from tensors to tensors.

Shape letters: N samples of a training step, R response tokens of a microbatch, sample after sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """All samples of a training step, of all ranks, in whole groups.  On the CPU, numbers in float64.

    A field per token has one tensor for each sample.  Except in ``token_ids``, it has as many entries as the answer has
    tokens, maybe none.
    """

    step: int
    """Training step, counted from 0."""
    rewards_N: Tensor
    groups_N: Tensor
    """Group numbers: samples with equal numbers answer the same prompt."""
    rollouts_N: Tensor
    """Rollout numbers within the group: samples of one group with equal numbers were made by one episode."""
    outcomes_N: Tensor
    """Outcome of each sample by ``--advantage-estimator``, before it looks at tokens.  For grpo: the reward less the
    mean of its group, over the group's standard deviation."""
    token_ids: tuple[Tensor, ...]
    """Tokens of prompt and answer; the answer's tokens are the last of each."""
    masks: tuple[Tensor, ...]
    """Loss masks, true at tokens that are trained on."""
    turns: tuple[Tensor, ...]
    """For each token the place of its turn among the turns of its answer, from 0; -1 at observations."""
    turn_rewards: tuple[Tensor, ...]
    """One number per turn: its reward, NaN if the episode gave none."""
    behaviour_logprobs: tuple[Tensor, ...]
    """Log-probs under the engine that sampled the answer; the proximal ones where they are unknown."""
    proximal_logprobs: tuple[Tensor, ...]
    """Log-probs under the trainer's weights at the start of the step; 0 at observations."""
    ref_logprobs: tuple[Tensor, ...] | None
    """Log-probs under the reference model, if there is one."""
    kl: tuple[Tensor, ...] | None
    """Estimates of the KL divergence from the reference model by ``--kl-loss-type``, in nats, if there is one."""


class AdvantageFn(Protocol):
    """A function for the worth of an answer, or of each of its tokens, compared with what was expected."""

    def __call__(self, samples: StepSamples, /) -> Tensor | Sequence[Tensor]:
        """Return one number per sample, or for each sample a tensor with one number per token of its answer.

        Called once per step, in one process; all ranks train on the result.
        """


class LossFn(Protocol):
    """A function for the policy loss of each token, before corrections, KL, entropy and averaging."""

    def __call__(
        self,
        logprobs_R: Tensor,
        old_logprobs_R: Tensor,
        advantages_R: Tensor,
        mask_R: Tensor,
        lengths: Sequence[int],
        /,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the losses, from which gradients flow to ``logprobs_R``, and numbers to report, one per token.

        ``lengths`` has the response tokens of each sample.  Where ``mask_R`` is false, the old log-probs equal the
        present ones, and the results are ignored.  The names must be the same in every call.  A number called
        ``clip_fraction`` is reported as ``train/clip_fraction``, any other NAME as ``train/custom/NAME``.
        """


class TisFn(Protocol):
    """A function that corrects losses for the difference between the engines' policy and the trainer's."""

    def __call__(
        self,
        losses_R: Tensor,
        logprobs_R: Tensor,
        behaviour_R: Tensor,
        mask_R: Tensor,
        lengths: Sequence[int],
        totals: Sequence[int],
        /,
    ) -> tuple[Tensor, Tensor | Sequence[Tensor] | None, Mapping[str, Tensor]]:
        """Return corrected losses, the tokens that stay in the loss, and numbers to report, one per token.

        Gradients flow from the result to ``losses_R``.  ``logprobs_R`` are those under the trainer's weights at the
        start of the step, ``behaviour_R`` those under the engine.  Where ``mask_R`` is false, the two are equal, and
        the results are ignored.  ``lengths`` has the response tokens of each sample, ``totals`` those of its prompt as
        well.  The tokens that stay are 1 or true in a tensor with one number per token, or in one tensor per sample;
        None: all.  A token that is removed adds nothing to the loss, but the divisors count it, as in slime.  The names
        must be the same in every call; NAME is reported as ``train/tis/NAME``.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A user's functions; None means the built-in one."""

    advantage: AdvantageFn | None = None
    loss: LossFn | None = None
    tis: TisFn | None = None
