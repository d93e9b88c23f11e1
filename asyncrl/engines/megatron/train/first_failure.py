"""The failure of a user's function inside a pass, kept until all ranks can raise it.

Raising at once would leave the other ranks waiting for this rank's gradients until a collective operation times out.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.engines.megatron.setup.ranks import of_every_rank
from asyncrl.errors import NonFiniteLoss, TrainerFailed


class FirstFailure:
    """The first failure of a user's function on this rank since the last ``raise_alike``."""

    def __init__(self) -> None:
        self._error: TrainerFailed | NonFiniteLoss | None = None

    @property
    def is_there(self) -> bool:
        """Whether a function has failed."""
        return self._error is not None

    def keep(self, error: TrainerFailed | NonFiniteLoss) -> None:
        """Keep an error, unless an earlier one is kept already."""
        self._error = self._error or error

    def raise_alike(self) -> None:
        """Raise the same error on all ranks if any rank has failed since the last call: the first such rank's.

        Every rank must call it after every pass; it costs an all-reduce of one number.  Raises TrainerFailed or
        NonFiniteLoss.
        """
        failure, self._error = self._error, None
        has_failed = torch.tensor(int(failure is not None))  # on the CPU, so that nothing waits for a GPU
        dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)
        if not has_failed:
            return
        found: list[Any] = of_every_rank(failure)
        first = next(rank for rank, each in enumerate(found) if each is not None)
        raise type(found[first])(f"rank {first}: {found[first]}") from failure


class Apart(torch.autograd.Function):
    """The result of a user's function, with a backward pass that runs separately from the model's.

    Its exceptions go to ``keep``, so that no other rank waits for this one.
    """

    @staticmethod
    def forward(ctx: Any, given_R: Tensor, way_back: tuple[Tensor, Tensor, Callable[[Exception], None]]) -> Tensor:
        """Return the result; ``way_back`` has the function's copy of ``given_R``, its result, and ``keep``."""
        ctx.way_back = way_back
        return way_back[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the function's copy."""
        # Invariant: no exception leaves this method, or other ranks would wait in the next collective.  With a GPU,
        # autograd calls it in a separate thread.  ``keep`` needs no lock: what it keeps is read after the pass.
        own_R, result_R, keep = ctx.way_back
        try:
            (found_R,) = torch.autograd.grad(result_R, own_R, gradient_R)
        except Exception as error:  # noqa: BLE001 (a user's function may raise anything)
            keep(error)
            return torch.zeros_like(own_R), None
        return found_R, None
