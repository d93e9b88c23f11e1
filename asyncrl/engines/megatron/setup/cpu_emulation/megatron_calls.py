"""Functions of Megatron that reach CUDA past ``torch.cuda``, replaced in Megatron's own modules."""

from typing import Any

import torch

from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.tensor_parallel.random._get_cuda_rng_state",
        parameters=("device", "clone", "graph_safe"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.tensor_parallel.random._set_cuda_rng_state",
        parameters=("new_state", "device", "graph_safe"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.tensor_parallel.random.CudaRNGStatesTracker",
        attributes=("_get_cuda_rng_state", "_set_cuda_rng_state"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        parameters=("tensor", "as_numpy", "record_stream"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher",
        attributes=("maybe_move_tensor_to_cpu",),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""


def replace() -> None:
    """Put the stand-ins in place."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # These two go to torch._C's CUDA generators, past torch.cuda.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # noqa: SLF001
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # noqa: SLF001

    # Leaves a CPU tensor a tensor although numpy was asked for; all_to_all_single then refuses it as split sizes.
    real_move = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return real_move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move
