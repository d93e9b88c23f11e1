"""Stand-ins that let megatron-core 0.19 run without CUDA.  They have no effect on a machine with CUDA.

Megatron asks ``torch.cuda`` for its device, streams and random state even when every tensor is on the CPU.  It also
hard-codes ``device="cuda"`` in places that no setting reaches.

    cuda_calls       functions of ``torch.cuda``                      for every module of the process
    tensor_calls     ``Tensor.type`` and ``Tensor.cuda``              for every module of the process
    megatron_calls   functions of Megatron that need a GPU            for Megatron's modules
    torch_on_cpu     ``torch`` with factories that read "cuda" as CPU for Megatron's modules

A comment at each stand-in names the place in Megatron that needs it.
"""

import sys

import torch

from asyncrl.engines.megatron.setup.cpu_emulation import cuda_calls, megatron_calls, tensor_calls
from asyncrl.engines.megatron.setup.cpu_emulation.torch_on_cpu import TORCH
from asyncrl.internals import check_internals


def emulate_cuda() -> None:
    """Install the stand-ins.  Call after importing Megatron's modules; a second call covers later imports.

    Raises InternalsChanged if a replaced function has changed.
    """
    # Invariant: the patches are never undone.  They last until the process ends and also affect code that is not ours,
    # so a process with a GPU must never get past this check.
    if torch.cuda.is_available():
        return
    if not cuda_calls.are_replaced():
        check_internals(tensor_calls.INTERNALS, megatron_calls.INTERNALS)
        cuda_calls.replace()
        tensor_calls.replace()
        megatron_calls.replace()
        # Megatron compiles parts of the MoE routing, which takes 15 s if there is a C++ compiler.
        torch.compiler.set_stance("force_eager")
    for name, module in list(sys.modules.items()):
        if name.split(".")[:2] == ["megatron", "core"] and getattr(module, "torch", None) is torch:
            module.torch = TORCH  # type: ignore[attr-defined]
