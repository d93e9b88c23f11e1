"""Functions of Megatron that use CUDA without ``torch.cuda``, replaced in Megatron's modules."""

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
    """Install the stand-ins in Megatron's modules."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # These two use torch._C's CUDA generators directly, without torch.cuda.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # noqa: SLF001
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # noqa: SLF001

    # The real function returns a CPU tensor unchanged even with as_numpy=True; all_to_all_single then rejects the
    # tensor as split sizes.
    real_move = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return real_move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move
