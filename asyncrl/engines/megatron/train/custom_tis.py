"""A user's off-policy correction in the trainer: the call, and checks of its result.

Shape letters: R response tokens of a microbatch, sample after sample.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.custom_functions import TisFn
from asyncrl.engines.megatron.train.checked_tensors import check_finite, check_names, check_shapes
from asyncrl.engines.megatron.train.first_failure import Apart, FirstFailure
from asyncrl.errors import NonFiniteLoss, PluginError, TrainerFailed, TrainerOutOfMemory, name_of

Corrected = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Losses, the tokens that stay in the loss, and the numbers to report under their full names."""


class CheckedTis:
    """A user's correction, tried once on made-up numbers so that a wrong shape shows before a model is loaded.

    In training it raises neither in the forward nor in the backward pass, as ``CheckedLoss``.
    """

    def __init__(self, function: TisFn, failure: FirstFailure | None = None) -> None:
        """Try ``function`` on made-up numbers.  Raises PluginError if it fails."""
        self._function, self._where = function, f"correction {name_of(function)}"
        self._names: frozenset[str] = frozenset()
        self.failure = failure or FirstFailure()
        try:
            self._names = frozenset(self._tried())
        except (TrainerFailed, NonFiniteLoss, torch.OutOfMemoryError) as error:
            raise PluginError(f"--custom-tis-function-path: tried on made-up numbers: {error}") from error

    def __call__(
        self,
        losses_R: Tensor,
        logprobs_R: Tensor,
        behaviour_R: Tensor,
        mask_R: Tensor,
        lengths: Sequence[int],
        totals: Sequence[int],
        /,
    ) -> Corrected:
        """Return the corrected losses, the tokens of ``mask_R`` that stay in the loss, and metrics."""
        if not lengths or self.failure.is_there:  # an empty microbatch only matches other ranks' passes
            return self._nothing(losses_R, mask_R)
        own_R = losses_R.detach().requires_grad_()
        # Tokens that no policy sampled may have any number: equal log-probs make their weight 1.
        behaviour_R = torch.where(mask_R, behaviour_R, logprobs_R)
        try:
            found_R, kept_R, told = self._checked(own_R, logprobs_R, behaviour_R, mask_R, lengths, totals)
            check_names(self._where, told, self._names)
        except (TrainerFailed, NonFiniteLoss) as error:
            self.failure.keep(error)
            return self._nothing(losses_R, mask_R)
        corrected_R = Apart.apply(losses_R, (own_R, found_R, self._keep))  # type: ignore[no-untyped-call]
        return corrected_R, kept_R, _renamed(told, mask_R & ~kept_R)

    def raise_alike(self) -> None:
        """See ``FirstFailure.raise_alike``."""
        self.failure.raise_alike()

    def _keep(self, error: Exception) -> None:
        """Keep an error of the backward pass."""
        self.failure.keep(self._raised(error))

    def _nothing(self, losses_R: Tensor, mask_R: Tensor) -> Corrected:
        """Return losses of 0 that the backward pass still runs through, and the metrics that every rank reports."""
        told = dict.fromkeys(self._names, torch.zeros_like(losses_R))
        return losses_R * 0.0, mask_R, _renamed(told, torch.zeros_like(mask_R))

    def _tried(self) -> Mapping[str, Tensor]:
        """Run the correction and its backward pass on two answers of three and two tokens, one of them masked.

        Raises TrainerFailed or NonFiniteLoss.
        """
        logprobs_R = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0])
        behaviour_R = logprobs_R + torch.tensor([0.0, 0.1, -0.1, 0.5, 0.0])
        losses_R = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0]).requires_grad_()
        mask_R = torch.tensor([True, True, True, True, False])
        found_R, _, told = self._checked(losses_R, logprobs_R, behaviour_R, mask_R, (3, 2), (5, 4))
        try:
            found_R.sum().backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise self._raised(error) from error
        return told

    def _checked(
        self,
        losses_R: Tensor,
        logprobs_R: Tensor,
        behaviour_R: Tensor,
        mask_R: Tensor,
        lengths: Sequence[int],
        totals: Sequence[int],
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Call the user's correction, and check its result.  Raises TrainerFailed or NonFiniteLoss."""
        try:
            found = self._function(losses_R, logprobs_R, behaviour_R, mask_R, lengths, totals)
        except torch.OutOfMemoryError:  # as in the model: the pass is repeated in smaller microbatches
            raise
        except Exception as error:  # a user's function may raise anything
            raise self._raised(error) from error
        if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], Mapping)):
            raise TrainerFailed(
                f"{self._where}: must return losses, a mask or None, and a dict, returned a {type(found).__name__}"
            )
        corrected_R, mask, told = found
        check_shapes(self._where, {"losses": corrected_R, **told}, losses_R)
        if not corrected_R.requires_grad:
            raise TrainerFailed(f"{self._where}: its losses have no gradient, must be computed from the given losses")
        kept_R = self._kept(mask, mask_R)
        check_finite(self._where, corrected_R, kept_R)
        return corrected_R, kept_R, told

    def _kept(self, mask: object, mask_R: Tensor) -> Tensor:
        """Return the tokens of ``mask_R`` that the user's mask keeps.  Raises TrainerFailed."""
        if mask is None:
            return mask_R
        if isinstance(mask, list | tuple) and mask and all(isinstance(each, Tensor) for each in mask):
            mask = torch.cat(list(mask))
        check_shapes(self._where, {"masks": mask}, mask_R)
        assert isinstance(mask, Tensor)
        is_kept_R = mask.to(mask_R.device) != 0
        if (mask.to(mask_R.device) != is_kept_R)[mask_R].any():
            raise TrainerFailed(f"{self._where}: masks must have 0 and 1 alone; multiply the losses by other weights")
        return mask_R & is_kept_R

    def _raised(self, error: Exception) -> TrainerFailed:
        kind = TrainerOutOfMemory if isinstance(error, torch.OutOfMemoryError) else TrainerFailed
        return kind(f"{self._where}: {type(error).__name__}: {error}")


def _renamed(told: Mapping[str, Tensor], removed_R: Tensor) -> dict[str, Tensor]:
    named = {f"train/tis/{name}": numbers for name, numbers in told.items()}
    return named | {"train/tis_removed": removed_R}
