"""torch's fused AdamW: one kernel over all weights, without temporary memory.

The default form allocates new tensors for all second moments at once: 4 bytes for each weight of a rank.
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
    """The members of ``optimizer`` by index, without members that have no parameters on this rank."""
    return {place: part for place, part in enumerate(members(optimizer)) if part.optimizer is not None}


def members(optimizer: Any) -> list[Any]:
    """All members of a chained optimizer, or the one optimizer in a list."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def adams(optimizer: Any) -> Iterator[torch.optim.AdamW]:
    """Yield each torch AdamW in ``optimizer``.

    Apex's and TransformerEngine's Adam are fused already, and Megatron handles them.
    """
    for part in optimizers(optimizer).values():
        if isinstance(part.optimizer, torch.optim.AdamW):
            yield part.optimizer


def fuse(optimizer: Any) -> None:
    """Use the fused kernel from the next step on."""
    for adam in adams(optimizer):
        # The hook changes what ``state_dict`` returns, not the optimizer's state, whose steps the kernel increments.
        adam.register_state_dict_post_hook(_with_steps_on_host)
        for group in adam.param_groups:
            group["fused"], group["foreach"] = True, False


def place_steps(optimizer: Any) -> None:
    """Give each parameter a separate ``step`` tensor on the parameter's device, where the fused kernel reads it.

    Call this after putting ``step`` into an optimizer's state.
    """
    for adam in adams(optimizer):
        for parameter, values in adam.state.items():
            if torch.is_tensor(values.get("step")):
                # The distributed optimizer puts the same tensor into every parameter's state, so each parameter would
                # increment it (megatron-core 0.19, distrib_optimizer.py, load_state_dict).
                values["step"] = values["step"].to(parameter.device, torch.float32, copy=True)


def _with_steps_on_host(_adam: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Move each ``step`` of the state dict ``found`` to the CPU, so that a machine without a GPU can read it."""
    state = {
        name: {**values, "step": values["step"].cpu()} if torch.is_tensor(values.get("step")) else values
        for name, values in found["state"].items()
    }
    return {**found, "state": state}
