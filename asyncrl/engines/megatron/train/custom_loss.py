"""A user's loss in the trainer: called, what it returns looked at, and what it gets wrong told to all ranks.

Shape letters: R response tokens of a microbatch, sample behind sample.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.custom_functions import LossFn
from asyncrl.engines.megatron.setup.ranks import of_every_rank
from asyncrl.errors import NonFiniteLoss, PluginError, TrainerFailed

CLIP_FRACTION = "clip_fraction"
"""The one number of a custom loss that has a place among ours."""


class CheckedLoss:
    """A user's loss, which has been tried once on made-up numbers: a wrong shape shows before a model is loaded.

    In training it never raises, neither in the pass nor on the way back: other ranks would wait for this one's
    gradients until a collective operation times out.  The first thing that goes wrong is kept for ``raise_alike``;
    until then no token has a loss.
    """

    def __init__(self, function: LossFn) -> None:
        """Raises PluginError."""
        self._function, self._where = function, f"loss function {name_of(function)}"
        self._names: frozenset[str] = frozenset()
        self._failure: TrainerFailed | NonFiniteLoss | None = None
        try:
            self._names = frozenset(self._tried())
        except TrainerFailed as error:
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
        """See LossFn; metrics come by their full names."""
        if not lengths or self._failure is not None:  # an empty microbatch keeps the ranks in step
            return self._nothing(logprobs_R)
        own_R = logprobs_R.detach().requires_grad_()
        # Tokens that no policy sampled may carry any number, and a gradient of 0 times NaN is NaN.
        old_R = torch.where(mask_R, old_logprobs_R, own_R.detach())
        try:
            losses_R, told = self._checked(own_R, old_R, advantages_R, mask_R, lengths)
            self._check_numbers(losses_R, told, mask_R)
        except (TrainerFailed, NonFiniteLoss) as error:
            self._failure = error
            return self._nothing(logprobs_R)
        return _Apart.apply(logprobs_R, (own_R, losses_R, self._keep)), _renamed(told)  # type: ignore[no-untyped-call]

    def raise_alike(self) -> None:
        """Raise what has gone wrong on any rank since the last call: on all ranks, the same.

        Every rank must call it after every pass; it costs one number from each.  Raises TrainerFailed or NonFiniteLoss.
        """
        failure, self._failure = self._failure, None
        has_failed = torch.tensor(int(failure is not None))  # on the CPU: no wait for a GPU
        dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)
        if not has_failed:
            return
        found: list[Any] = of_every_rank(failure)
        first = next(rank for rank, each in enumerate(found) if each is not None)
        raise type(found[first])(f"rank {first}: {found[first]}") from failure

    def _keep(self, error: Exception) -> None:
        """What went wrong on the way back, where the first thing is the last microbatch's."""
        self._failure = self._failure or self._raised(error)

    def _nothing(self, logprobs_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """No loss, which the way back leads through all the same; the metrics are there on every rank."""
        return logprobs_R * 0.0, _renamed(dict.fromkeys(self._names, torch.zeros_like(logprobs_R)))

    def _tried(self) -> Mapping[str, Tensor]:
        """There and back with two answers of three and two tokens, one of them masked.  Raises TrainerFailed."""
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
        """Raises TrainerFailed."""
        try:
            found = self._function(logprobs_R, old_R, advantages_R, mask_R, lengths)
        except Exception as error:  # a user's function may raise anything
            raise self._raised(error) from error
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise TrainerFailed(f"{self._where}: must return losses and a dict, returned a {type(found).__name__}")
        for name, numbers in {"losses": found[0], **found[1]}.items():
            if not isinstance(numbers, Tensor):
                raise TrainerFailed(f"{self._where}: {name} must be a tensor, is a {type(numbers).__name__}")
            if numbers.shape != logprobs_R.shape:
                raise TrainerFailed(
                    f"{self._where}: {name} have the shape {tuple(numbers.shape)}, the tokens {tuple(logprobs_R.shape)}"
                )
        if not found[0].requires_grad:
            raise TrainerFailed(f"{self._where}: its losses do not come from logprobs")
        return found

    def _check_numbers(self, losses_R: Tensor, told: Mapping[str, Tensor], mask_R: Tensor) -> None:
        """Raises TrainerFailed or NonFiniteLoss."""
        if told.keys() != self._names:
            raise TrainerFailed(f"{self._where}: reports {_listed(told)}, where it reported {_listed(self._names)}")
        is_bad_R = mask_R & ~losses_R.detach().isfinite()
        if is_bad_R.any():
            raise NonFiniteLoss(
                f"{self._where}: {int(is_bad_R.sum())} of {int(mask_R.sum())} losses are not finite, the first is "
                f"{losses_R[is_bad_R][0].item()}"
            )

    def _raised(self, error: Exception) -> TrainerFailed:
        return TrainerFailed(f"{self._where}: {type(error).__name__}: {error}")


class _Apart(torch.autograd.Function):
    """The losses, whose way back is taken apart from the model's: what it raises goes to ``keep``, and stops nobody."""

    @staticmethod
    def forward(ctx: Any, logprobs_R: Tensor, way_back: tuple[Tensor, Tensor, Callable[[Exception], None]]) -> Tensor:
        ctx.way_back = way_back
        return way_back[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None]:
        # Autograd calls this, on a GPU in a thread of its own.  Nothing may leave it as an exception: other ranks would
        # wait in the next collective.  ``keep`` needs no lock, because it is read after the pass has returned.
        own_R, losses_R, keep = ctx.way_back
        try:
            (found_R,) = torch.autograd.grad(losses_R, own_R, gradient_R)
        except Exception as error:  # noqa: BLE001 (the user's: may be anything)
            keep(error)
            return torch.zeros_like(own_R), None
        return found_R, None


def _renamed(told: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"train/{name}" if name == CLIP_FRACTION else f"train/custom/{name}": numbers for name, numbers in told.items()
    }


def name_of(function: object) -> str:
    """What errors call a user's function."""
    return getattr(function, "__name__", type(function).__name__)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
