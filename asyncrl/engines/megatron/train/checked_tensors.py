"""Checks of the tensors that a user's function returns, one number per token."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from asyncrl.errors import NonFiniteLoss, TrainerFailed


def check_shapes(where: str, tensors: Mapping[str, object], like_R: Tensor) -> None:
    """Raise TrainerFailed unless each value is a tensor with one number per token."""
    for name, numbers in tensors.items():
        if not isinstance(numbers, Tensor):
            raise TrainerFailed(f"{where}: {name} must be a tensor, is a {type(numbers).__name__}")
        if numbers.shape != like_R.shape:
            raise TrainerFailed(
                f"{where}: {name} have the shape {tuple(numbers.shape)}, must have {tuple(like_R.shape)}: one number "
                "per token"
            )


def check_names(where: str, told: Mapping[str, Tensor], first: frozenset[str]) -> None:
    """Raise TrainerFailed unless a function reports the names that it reported first."""
    if told.keys() != first:
        raise TrainerFailed(
            f"{where}: reports {_listed(told)}, but reported {_listed(first)} at first; the names must be the same in "
            "every call"
        )


def check_finite(where: str, losses_R: Tensor, mask_R: Tensor) -> None:
    """Raise NonFiniteLoss unless the losses of all tokens in the mask are finite."""
    is_bad_R = mask_R & ~losses_R.detach().isfinite()
    if is_bad_R.any():
        raise NonFiniteLoss(
            f"{where}: {int(is_bad_R.sum())} of {int(mask_R.sum())} losses are not finite, the first is "
            f"{losses_R[is_bad_R][0].item()}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
