"""A user's loss in the trainer: the call, and checks of its result.

Shape letters: R response tokens of a microbatch, sample after sample.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.custom_functions import LossFn
from asyncrl.engines.megatron.train.checked_tensors import check_finite, check_names, check_shapes
from asyncrl.engines.megatron.train.first_failure import Apart, FirstFailure
from asyncrl.errors import NonFiniteLoss, PluginError, TrainerFailed, TrainerOutOfMemory, name_of

CLIP_FRACTION = "clip_fraction"
"""The one number of a custom loss that is reported under a built-in name, ``train/clip_fraction``."""


class CheckedLoss:
    """A user's loss, tried once on made-up numbers so that a wrong shape shows before a model is loaded.

    In training it raises neither in the forward nor in the backward pass.  The first failure is kept in ``failure``;
    until its ``raise_alike`` is called, no token has a loss.
    """

    def __init__(self, function: LossFn, failure: FirstFailure | None = None) -> None:
        """Try ``function`` on made-up numbers.  Raises PluginError if it fails."""
        self._function, self._where = function, f"loss function {name_of(function)}"
        self._names: frozenset[str] = frozenset()
        self.failure = failure or FirstFailure()
        try:
            self._names = frozenset(self._tried())
        except (TrainerFailed, torch.OutOfMemoryError) as error:
            raise PluginError(f"--custom-loss-function-path: tried on made-up numbers: {error}") from error

    def __call__(
        self,
        logprobs_R: Tensor,
        old_logprobs_R: Tensor,
        advantages_R: Tensor,
        mask_R: Tensor,
        lengths: Sequence[int],
        /,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses and metrics as ``LossFn`` does; the metrics have their full names."""
        if not lengths or self.failure.is_there:  # an empty microbatch only matches other ranks' passes
            return self._nothing(logprobs_R)
        own_R = logprobs_R.detach().requires_grad_()
        # Tokens that no policy sampled may have any number, and a gradient of 0 times NaN is NaN.
        old_R = torch.where(mask_R, old_logprobs_R, own_R.detach())
        try:
            losses_R, told = self._checked(own_R, old_R, advantages_R, mask_R, lengths)
            check_names(self._where, told, self._names)
            check_finite(self._where, losses_R, mask_R)
        except (TrainerFailed, NonFiniteLoss) as error:
            self.failure.keep(error)
            return self._nothing(logprobs_R)
        return Apart.apply(logprobs_R, (own_R, losses_R, self._keep)), _renamed(told)  # type: ignore[no-untyped-call]

    def raise_alike(self) -> None:
        """See ``FirstFailure.raise_alike``."""
        self.failure.raise_alike()

    def _keep(self, error: Exception) -> None:
        """Keep an error of the backward pass."""
        self.failure.keep(self._raised(error))

    def _nothing(self, logprobs_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses of 0 that the backward pass still runs through, and the metrics that every rank reports."""
        return logprobs_R * 0.0, _renamed(dict.fromkeys(self._names, torch.zeros_like(logprobs_R)))

    def _tried(self) -> Mapping[str, Tensor]:
        """Run the loss and its backward pass on two answers of three and two tokens, one of them masked.

        Raises TrainerFailed.
        """
        old_R = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0])
        logprobs_R = (old_R + torch.tensor([0.0, 0.1, -0.1, 0.5, -0.5])).requires_grad_()
        advantages_R = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0])
        mask_R = torch.tensor([True, True, True, True, False])
        losses_R, told = self._checked(logprobs_R, old_R, advantages_R, mask_R, (3, 2))
        try:
            losses_R.sum().backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise self._raised(error) from error
        return told

    def _checked(
        self, logprobs_R: Tensor, old_R: Tensor, advantages_R: Tensor, mask_R: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Call the user's loss, and check the types and shapes of its result.  Raises TrainerFailed."""
        try:
            found = self._function(logprobs_R, old_R, advantages_R, mask_R, lengths)
        except torch.OutOfMemoryError:  # as in the model: the pass is repeated in smaller microbatches
            raise
        except Exception as error:  # a user's function may raise anything
            raise self._raised(error) from error
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise TrainerFailed(f"{self._where}: must return losses and a dict, returned a {type(found).__name__}")
        check_shapes(self._where, {"losses": found[0], **found[1]}, logprobs_R)
        if not found[0].requires_grad:
            raise TrainerFailed(f"{self._where}: its losses have no gradient, must be computed from logprobs")
        return found

    def _raised(self, error: Exception) -> TrainerFailed:
        kind = TrainerOutOfMemory if isinstance(error, torch.OutOfMemoryError) else TrainerFailed
        return kind(f"{self._where}: {type(error).__name__}: {error}")


def _renamed(told: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"train/{name}" if name == CLIP_FRACTION else f"train/custom/{name}": numbers for name, numbers in told.items()
    }
