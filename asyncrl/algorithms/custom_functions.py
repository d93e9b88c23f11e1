"""The shapes of a user's own advantage and loss: tensors in, tensors out.

Shape letters: N samples of a training step, R response tokens of a microbatch, sample behind sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """Every sample of a training step, of all ranks: whole groups.  On the CPU, numbers in float64.

    What is per token has one tensor for each sample, of as many entries as its answer has tokens: maybe none.
    """

    step: int
    """Training step, counted from 0."""
    rewards_N: Tensor
    groups_N: Tensor
    """Samples with equal numbers answer the same prompt."""
    outcomes_N: Tensor
    """What ``--advantage-estimator`` makes of the rewards before it looks at tokens: for grpo the rewards less the mean
    of their group, over its standard deviation."""
    token_ids: tuple[Tensor, ...]
    """Of prompt and answer: the answer's tokens are the last of each."""
    masks: tuple[Tensor, ...]
    """True at tokens that are trained on."""
    behaviour_logprobs: tuple[Tensor, ...]
    """Of the engine that sampled."""
    proximal_logprobs: tuple[Tensor, ...]
    """Of the trainer at the start of the step."""
    ref_logprobs: tuple[Tensor, ...] | None
    """Of the reference model, if there is one."""
    kl: tuple[Tensor, ...] | None
    """``--kl-loss-type``'s estimate of the distance from the reference model, in nats, if there is one."""


class AdvantageFn(Protocol):
    """What an answer, or each of its tokens, is worth compared with what was expected."""

    def __call__(self, samples: StepSamples, /) -> Tensor | Sequence[Tensor]:
        """One number for each sample, or for each sample a tensor of one number per token of its answer.

        Called once a step, in one process; all ranks train on what it returns.
        """


class LossFn(Protocol):
    """The policy loss of each token, before corrections, KL, entropy and averaging."""

    def __call__(
        self,
        logprobs_R: Tensor,
        old_logprobs_R: Tensor,
        advantages_R: Tensor,
        mask_R: Tensor,
        lengths: Sequence[int],
        /,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The losses, through which gradients go back to ``logprobs_R``; and numbers to be reported, one per token.

        ``lengths`` are the response tokens of each sample.  Where ``mask_R`` is false the old log-probs are the present
        ones, and what is returned is passed over.  The names must be the same in every call.  A number called
        ``clip_fraction`` is reported as ``train/clip_fraction``, any other NAME as ``train/custom/NAME``.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A user's functions; None: ours."""

    advantage: AdvantageFn | None = None
    loss: LossFn | None = None
