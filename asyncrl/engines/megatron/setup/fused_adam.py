"""torch's AdamW as one kernel over all weights: it needs no memory of its own.

Its plain form makes new tensors of all second averages at once, 4 bytes for each weight of a rank.
"""

from collections.abc import Iterator
from typing import Any

import torch

from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="torch.optim.AdamW", attributes=("exp_avg", "exp_avg_sq", "foreach", "fused", "step"), used_in=__name__
    ),
    Internal(name="torch.optim.Optimizer.register_state_dict_post_hook", parameters=("self", "hook"), used_in=__name__),
    Internal(
        name="megatron.core.optimizer.optimizer.ChainedOptimizer", attributes=("chained_optimizers",), used_in=__name__
    ),
    Internal(name="megatron.core.optimizer.optimizer.MegatronOptimizer", attributes=("optimizer",), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""


def optimizers(optimizer: Any) -> dict[int, Any]:
    """Megatron's optimizers that ``optimizer`` is made of, by place; those without parameters on this rank left out."""
    return {place: part for place, part in enumerate(members(optimizer)) if part.optimizer is not None}


def members(optimizer: Any) -> list[Any]:
    """All of them."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def adams(optimizer: Any) -> Iterator[torch.optim.AdamW]:
    """Those of torch; those of Apex and TransformerEngine are fused, and Megatron's own business."""
    for part in optimizers(optimizer).values():
        if isinstance(part.optimizer, torch.optim.AdamW):
            yield part.optimizer


def fuse(optimizer: Any) -> None:
    """From the next step on."""
    for adam in adams(optimizer):
        # The hook changes what ``state_dict`` returns, not the optimizer's own state, whose steps the kernel counts.
        adam.register_state_dict_post_hook(_with_steps_on_host)
        for group in adam.param_groups:
            group["fused"], group["foreach"] = True, False


def place_steps(optimizer: Any) -> None:
    """Where the kernel reads them: each parameter's own count of steps, beside the parameter.

    Whoever puts ``step`` into an optimizer's state calls this afterwards.
    """
    for adam in adams(optimizer):
        for parameter, values in adam.state.items():
            if torch.is_tensor(values.get("step")):
                # The distributed optimizer puts one tensor into every parameter's state, which each would count up
                # (megatron-core 0.19, distrib_optimizer.py, load_state_dict).
                values["step"] = values["step"].to(parameter.device, torch.float32, copy=True)


def _with_steps_on_host(_adam: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints hold the step as a number, which a machine without a GPU can read."""
    state = {
        name: {**values, "step": values["step"].cpu()} if torch.is_tensor(values.get("step")) else values
        for name, values in found["state"].items()
    }
    return {**found, "state": state}
