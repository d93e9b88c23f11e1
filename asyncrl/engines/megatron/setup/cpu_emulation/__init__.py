"""Stand-ins that let megatron-core 0.19 run without CUDA.  On a machine with CUDA nothing here has an effect.

Megatron asks ``torch.cuda`` for its device, streams and random state even when every tensor lives on the CPU, and it
names ``device="cuda"`` in places that no setting reaches.

    cuda_calls       functions of ``torch.cuda``                      for every module of the process
    tensor_calls     ``Tensor.type`` and ``Tensor.cuda``              for every module of the process
    megatron_calls   functions of Megatron that need a GPU            for Megatron's modules
    torch_on_cpu     ``torch`` with factories that read "cuda" as CPU for Megatron's modules

Each stand-in names the place in Megatron that needs it.
"""

import sys

import torch

from asyncrl.engines.megatron.setup.cpu_emulation import cuda_calls, megatron_calls, tensor_calls
from asyncrl.engines.megatron.setup.cpu_emulation.torch_on_cpu import TORCH
from asyncrl.internals import check_internals


def emulate_cuda() -> None:
    """Put the stand-ins in place.  Call after importing Megatron's modules; a second call covers later imports.

    Raises InternalsChanged.
    """
    # Invariant: never undone.  Whatever was patched stays so until the process ends, also for code that is not ours;
    # a process that has a GPU must therefore never come past this line.
    if torch.cuda.is_available():
        return
    if not cuda_calls.are_replaced():
        check_internals(tensor_calls.INTERNALS, megatron_calls.INTERNALS)
        cuda_calls.replace()
        tensor_calls.replace()
        megatron_calls.replace()
        # Megatron compiles parts of the mixture's routing: with a C++ compiler, if there is one, and for 15 s.
        torch.compiler.set_stance("force_eager")
    for name, module in list(sys.modules.items()):
        if name.split(".")[:2] == ["megatron", "core"] and getattr(module, "torch", None) is torch:
            module.torch = TORCH  # type: ignore[attr-defined]
