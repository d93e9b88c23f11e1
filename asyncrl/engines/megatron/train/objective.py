"""The loss that one optimizer update minimises, per response token, assembled from ``asyncrl.algorithms``.

Shape letters: R response tokens of a microbatch, sample after sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import importance_weights, off_policy_sequences
from asyncrl.algorithms.custom_functions import LossFn, TisFn
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.losses import cispo, gspo, held_log_ratio, ppo_clip, rollout_weights, token_weights, value_loss
from asyncrl.algorithms.score_centering import KnownIds, RatioWeight, score_centering
from asyncrl.config.areas import TrainConfig
from asyncrl.config.derived import eps_clip_high
from asyncrl.engines.megatron.model.packing import Microbatch
from asyncrl.engines.megatron.setup.transfer import on_device
from asyncrl.token_columns import TokenSets


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The policy's loss, and the divisor of its sum."""

    train: TrainConfig
    temperature: float
    """Divisor of the logits."""
    against_rollout: bool
    """True: the ratio is taken against the behaviour log-probs.  False: against the proximal ones."""
    count: int
    """Divisor of the weighted sum of losses: tokens or rollouts of the whole update, on all ranks."""
    custom: LossFn | None = None
    """A user's loss in place of the clipped loss; it returns its metrics under their full names."""
    tis: TisFn | None = None
    """A user's correction in place of ``importance_weights``; it returns one mask, and full names as well."""

    def loss(
        self, row: Microbatch, logprobs_R: Tensor, entropies_R: Tensor, top_I: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this microbatch's share of the update's loss, and sums over its trained tokens by metric name.

        ``top_I`` are the log-probs of the likeliest ids, for score centering.  The names are the same for every
        microbatch.
        """
        tokens = _Tokens.of(row, logprobs_R)
        if self.train.use_score_centering:
            losses_R, kept_R, told = self._centered_loss(tokens, row, top_I)
        else:
            losses_R, kept_R, told = self._policy_loss(tokens, row)
        if self.train.use_kl_loss:
            kl_R = self._kl(tokens)
            losses_R, told["train/kl"] = losses_R + self.train.kl_loss_coef * kl_R, kl_R
        if self.train.entropy_coef:
            losses_R = losses_R - self.train.entropy_coef * entropies_R
        told["train/entropy"] = entropies_R
        return _averaged(losses_R, told, tokens.mask_R, kept_R, row, self.train, self.count)

    def _policy_loss(self, tokens: "_Tokens", row: Microbatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute corrected losses, the tokens that stay in the loss, and metrics."""
        losses_R, told = self._token_losses(tokens, row.lengths)
        if self.train.use_opsm:
            losses_R, told["train/opsm_masked"] = self._without_distant(losses_R, tokens, row.lengths)
        if not self.train.use_tis:
            return losses_R, tokens.mask_R, told
        given = (tokens.proximal_R, tokens.behaviour_R, tokens.mask_R, row.lengths)
        if self.tis is not None:
            losses_R, kept_R, more = self.tis(losses_R, *given, row.totals)
            assert isinstance(kept_R, Tensor), "the function must be checked, see CheckedTis"
            return losses_R, kept_R, {**told, **more}
        weights_R, is_outside_R = importance_weights(
            *given,
            level=self.train.tis_level,
            mode=self.train.tis_mode,
            low=self.train.tis_clip_low,
            high=self.train.tis_clip,
        )
        told |= {"train/tis_weight": weights_R, "train/tis_outside": is_outside_R}
        return losses_R * weights_R, tokens.mask_R, told

    def _centered_loss(
        self, tokens: "_Tokens", row: Microbatch, top_I: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute losses with centered scores, the tokens that stay in the loss, and metrics."""
        train, device = self.train, tokens.logprobs_R.device
        sets = TokenSets.unknown(len(tokens.mask_R), has_logprobs=True) if row.top is None else row.top
        assert sets.logprobs_I is not None, "the engines' likeliest ids must have log-probs"
        known = KnownIds(
            counts_T=on_device(sets.counts_T, device),
            logprobs_I=tokens.logprobs_R.new_zeros(0) if top_I is None else top_I,
            behaviour_I=on_device(sets.logprobs_I, device),
        )
        weight = RatioWeight(
            mode=train.tis_mode if train.use_tis else "none", low=train.tis_clip_low, high=train.tis_clip
        )
        given = (tokens.logprobs_R, tokens.behaviour_R, tokens.advantages_R, tokens.mask_R)
        losses_R, moved_R = score_centering(*given, known, weight)
        told = {
            "train/clip_fraction": torch.zeros_like(tokens.mask_R),
            "train/score_subtracted": moved_R,
            "train/score_uncentered": known.counts_T == 0,
        }
        if train.use_tis:
            ratio_R = held_log_ratio(tokens.logprobs_R.detach(), tokens.behaviour_R, tokens.mask_R).exp()
            told["train/tis_weight"] = weight(ratio_R)
            told["train/tis_outside"] = (ratio_R < train.tis_clip_low) | (ratio_R > train.tis_clip)
        if train.use_opsm:
            losses_R, told["train/opsm_masked"] = self._without_distant(losses_R, tokens, row.lengths)
        return losses_R, tokens.mask_R, told

    def _without_distant(self, losses_R: Tensor, tokens: "_Tokens", lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Set the losses of ``off_policy_sequences`` to 0; the second result marks them."""
        is_left_out_R = off_policy_sequences(
            tokens.logprobs_R,
            tokens.behaviour_R,
            tokens.advantages_R,
            tokens.mask_R,
            lengths,
            delta=self.train.opsm_delta,
        )
        return torch.where(is_left_out_R, 0.0, losses_R), is_left_out_R

    def _token_losses(self, tokens: "_Tokens", lengths: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.custom is None:
            losses_R, clipped_R = self._clipped(tokens, lengths)
            return losses_R, {"train/clip_fraction": clipped_R}
        losses_R, told = self.custom(tokens.logprobs_R, self._old(tokens), tokens.advantages_R, tokens.mask_R, lengths)
        return losses_R, {"train/clip_fraction": torch.zeros_like(tokens.mask_R), **told}

    def _clipped(self, tokens: "_Tokens", lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        train = self.train
        ratio_of = (tokens.logprobs_R, self._old(tokens), tokens.advantages_R, tokens.mask_R)
        low, high = train.eps_clip, eps_clip_high(train)
        if train.advantage_estimator == "cispo":
            return cispo(*ratio_of, eps_low=low, eps_high=high)
        if train.advantage_estimator == "gspo":
            return gspo(*ratio_of, lengths, eps_low=low, eps_high=high, eps_dual=train.eps_clip_c)
        return ppo_clip(*ratio_of, eps_low=low, eps_high=high, eps_dual=train.eps_clip_c)

    def _kl(self, tokens: "_Tokens") -> Tensor:
        assert tokens.ref_R is not None, "reference log-probs must be computed before the loss"
        weights_R = None
        if self.train.use_unbiased_kl:
            weights_R = held_log_ratio(tokens.logprobs_R, self._old(tokens), tokens.mask_R).exp()
        return kl_estimate(self.train.kl_loss_type, tokens.logprobs_R, tokens.ref_R, weights_R)

    def _old(self, tokens: "_Tokens") -> Tensor:
        return tokens.behaviour_R if self.against_rollout else tokens.proximal_R


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """The critic's loss, and the divisor of its sum."""

    train: TrainConfig
    count: int
    """Divisor of the weighted sum of losses, as in ``Objective``."""

    def loss(self, row: Microbatch, values_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Objective.loss``."""
        device = values_R.device
        assert row.values_R is not None and row.returns_R is not None, "returns must be computed before the loss"
        old_R, returns_R = (on_device(numbers, device) for numbers in (row.values_R, row.returns_R))
        losses_R, clipped_R = value_loss(values_R, old_R, returns_R, clip=self.train.value_clip)
        mask_R = on_device(row.mask_R, device)
        told = {"train/value_loss": losses_R, "train/value_clip_fraction": clipped_R}
        return _averaged(losses_R, told, mask_R, mask_R, row, self.train, self.count)


def _averaged(
    losses_R: Tensor,
    told: dict[str, Tensor],
    mask_R: Tensor,
    kept_R: Tensor,
    row: Microbatch,
    train: TrainConfig,
    count: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute this microbatch's share of the mean loss, and the sums over its trained tokens.

    Tokens of ``mask_R`` that are not in ``kept_R`` add nothing to the loss, but its divisors and the sums count them.
    """
    if train.calculate_per_token_loss:
        weights_R = token_weights(mask_R, row.lengths)
    else:
        weights_R = rollout_weights(mask_R, row.lengths, row.rollout_tokens)
    # A weight of 0 is not enough: losses of tokens outside the mask may be NaN, and 0 times NaN is NaN.
    loss = (torch.where(kept_R, losses_R, 0.0) * weights_R).sum() / count
    sums = {name: torch.where(mask_R, value.detach(), 0).double().sum() for name, value in told.items()}
    return loss, sums | {"train/loss": loss.detach().double()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """A microbatch's response tokens on the model's device."""

    logprobs_R: Tensor
    mask_R: Tensor
    advantages_R: Tensor
    behaviour_R: Tensor
    proximal_R: Tensor
    ref_R: Tensor | None

    @classmethod
    def of(cls, row: Microbatch, logprobs_R: Tensor) -> "_Tokens":
        """Move the tokens to the device.

        Log-probs of this pass replace missing proximal ones, and proximal ones replace unknown behaviour log-probs.
        """
        device = logprobs_R.device
        assert row.advantages_R is not None, "advantages must be computed before the loss"
        proximal, ref = row.proximal_logprobs_R, row.ref_logprobs_R
        proximal_R = logprobs_R.detach() if proximal is None else on_device(proximal, device)
        behaviour_R = on_device(row.behaviour_logprobs_R, device)
        return cls(
            logprobs_R=logprobs_R,
            mask_R=on_device(row.mask_R, device),
            advantages_R=on_device(row.advantages_R, device),
            behaviour_R=torch.where(behaviour_R.isnan(), proximal_R, behaviour_R),
            proximal_R=proximal_R,
            ref_R=None if ref is None else on_device(ref, device),
        )
