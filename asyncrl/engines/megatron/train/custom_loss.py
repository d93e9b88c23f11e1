"""A user's loss in the trainer: the call, checks of its result, and the same error on all ranks if it fails.

Shape letters: R response tokens of a microbatch, sample after sample.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.custom_functions import LossFn
from asyncrl.engines.megatron.setup.ranks import of_every_rank
from asyncrl.errors import NonFiniteLoss, PluginError, TrainerFailed, name_of

CLIP_FRACTION = "clip_fraction"
"""The one number of a custom loss that is reported under a built-in name, ``train/clip_fraction``."""


class CheckedLoss:
    """A user's loss, tried once on made-up numbers so that a wrong shape shows before a model is loaded.

    In training it raises neither in the forward nor in the backward pass: other ranks would wait for this rank's
    gradients until a collective operation times out.  The first failure is kept for ``raise_alike``; until that call no
    token has a loss.
    """

    def __init__(self, function: LossFn) -> None:
        """Try ``function`` on made-up numbers.  Raises PluginError if it fails."""
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
        """Compute losses and metrics as ``LossFn`` does; the metrics have their full names."""
        if not lengths or self._failure is not None:  # an empty microbatch only matches other ranks' passes
            return self._nothing(logprobs_R)
        own_R = logprobs_R.detach().requires_grad_()
        # Tokens that no policy sampled may have any number, and a gradient of 0 times NaN is NaN.
        old_R = torch.where(mask_R, old_logprobs_R, own_R.detach())
        try:
            losses_R, told = self._checked(own_R, old_R, advantages_R, mask_R, lengths)
            self._check_numbers(losses_R, told, mask_R)
        except (TrainerFailed, NonFiniteLoss) as error:
            self._failure = error
            return self._nothing(logprobs_R)
        return _Apart.apply(logprobs_R, (own_R, losses_R, self._keep)), _renamed(told)  # type: ignore[no-untyped-call]

    def raise_alike(self) -> None:
        """Raise the same error on all ranks if any rank has failed since the last call: the first such rank's.

        Every rank must call it after every pass; it costs an all-reduce of one number.  Raises TrainerFailed or
        NonFiniteLoss.
        """
        failure, self._failure = self._failure, None
        has_failed = torch.tensor(int(failure is not None))  # on the CPU, so that nothing waits for a GPU
        dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)
        if not has_failed:
            return
        found: list[Any] = of_every_rank(failure)
        first = next(rank for rank, each in enumerate(found) if each is not None)
        raise type(found[first])(f"rank {first}: {found[first]}") from failure

    def _keep(self, error: Exception) -> None:
        """Keep an error of the backward pass, unless an earlier error is kept already."""
        self._failure = self._failure or self._raised(error)

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
        except Exception as error:  # a user's function may raise anything
            raise self._raised(error) from error
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise TrainerFailed(f"{self._where}: must return losses and a dict, returned a {type(found).__name__}")
        for name, numbers in {"losses": found[0], **found[1]}.items():
            if not isinstance(numbers, Tensor):
                raise TrainerFailed(f"{self._where}: {name} must be a tensor, is a {type(numbers).__name__}")
            if numbers.shape != logprobs_R.shape:
                raise TrainerFailed(
                    f"{self._where}: {name} have the shape {tuple(numbers.shape)}, must have "
                    f"{tuple(logprobs_R.shape)}: one number per token"
                )
        if not found[0].requires_grad:
            raise TrainerFailed(f"{self._where}: its losses have no gradient, must be computed from logprobs")
        return found

    def _check_numbers(self, losses_R: Tensor, told: Mapping[str, Tensor], mask_R: Tensor) -> None:
        """Check the names of metrics and that losses are finite.  Raises TrainerFailed or NonFiniteLoss."""
        if told.keys() != self._names:
            raise TrainerFailed(
                f"{self._where}: reports {_listed(told)}, but reported {_listed(self._names)} at first; "
                "the names must be the same in every call"
            )
        is_bad_R = mask_R & ~losses_R.detach().isfinite()
        if is_bad_R.any():
            raise NonFiniteLoss(
                f"{self._where}: {int(is_bad_R.sum())} of {int(mask_R.sum())} losses are not finite, the first is "
                f"{losses_R[is_bad_R][0].item()}"
            )

    def _raised(self, error: Exception) -> TrainerFailed:
        return TrainerFailed(f"{self._where}: {type(error).__name__}: {error}")


class _Apart(torch.autograd.Function):
    """The losses, with a backward pass that runs separately from the model's.

    Its exceptions go to ``keep``, so that no other rank waits for this one.
    """

    @staticmethod
    def forward(ctx: Any, logprobs_R: Tensor, way_back: tuple[Tensor, Tensor, Callable[[Exception], None]]) -> Tensor:
        ctx.way_back = way_back
        return way_back[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None]:
        # Invariant: no exception leaves this method, or other ranks would wait in the next collective.  With a GPU,
        # autograd calls it in a separate thread.  ``keep`` needs no lock: what it keeps is read after the pass.
        own_R, losses_R, keep = ctx.way_back
        try:
            (found_R,) = torch.autograd.grad(losses_R, own_R, gradient_R)
        except Exception as error:  # noqa: BLE001 (a user's function may raise anything)
            keep(error)
            return torch.zeros_like(own_R), None
        return found_R, None


def _renamed(told: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"train/{name}" if name == CLIP_FRACTION else f"train/custom/{name}": numbers for name, numbers in told.items()
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
