"""Stand-ins that let megatron-core 0.19 run where there is no CUDA.  Where there is, nothing here does anything.

Megatron asks ``torch.cuda`` for its device, streams and random state also when every tensor lives on the CPU, and
names ``device="cuda"`` in places that no setting reaches.  Each stand-in below says which place needs it.
"""

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


def install() -> None:
    """Put the stand-ins in place.  Call after importing the Megatron modules; a second call covers later imports."""
    if torch.cuda.is_available():
        return
    if not isinstance(torch.cuda.current_device, _StandIn):
        _replace_cuda_calls()
        _replace_tensor_calls()
        _replace_megatron_calls()
        # Megatron compiles parts of the mixture's routing: with a C++ compiler, if there is one, and for 15 s.
        torch.compiler.set_stance("force_eager")
    for name, module in list(sys.modules.items()):
        if name.split(".")[:2] == ["megatron", "core"] and getattr(module, "torch", None) is torch:
            module.torch = _TORCH  # type: ignore[attr-defined]


class _StandIn:
    """A function in the place of one that raises without CUDA."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Stream:
    """Work on a CPU is done when the call returns, so there is nothing to order or to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: "_Stream") -> None:
        pass

    def wait_event(self, event: "_Stream") -> None:
        pass

    def record_event(self) -> "_Stream":
        return self  # whoever waits for the event may as well wait for the stream

    def synchronize(self) -> None:
        pass


def _replace_cuda_calls() -> None:
    stream = _Stream()
    stand_ins: dict[str, Callable[..., Any]] = {
        # device=torch.cuda.current_device(): DDP's buffers, the router, tensor-parallel mappings.
        "current_device": lambda: _CPU,
        # The token dispatcher of the mixture of experts makes a side stream and waits for it.
        "current_stream": lambda *args: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *args: None,
        # Seeds of the tensor-parallel random trackers (tensor_parallel/random.py).
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    }
    for name, function in stand_ins.items():
        setattr(torch.cuda, name, _StandIn(function))
    torch.cuda.Stream = _Stream  # type: ignore[misc,assignment]


def _replace_tensor_calls() -> None:
    real_type = torch.Tensor.type

    def type_as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizer sorts parameters by comparing type() with 'torch.cuda.FloatTensor' (optimizer/optimizer.py).
        answer = real_type(tensor, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001
        asked = not args and not kwargs and caller.startswith("megatron.core.optimizer")
        return answer.replace("torch.", "torch.cuda.", 1) if asked else answer

    torch.Tensor.type = type_as_on_cuda  # type: ignore[method-assign,assignment]
    # The last pipeline stage's copy of a tied embedding (models/common/language_module/language_module.py).
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]


def _replace_megatron_calls() -> None:
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


class _TorchOnCpu(types.ModuleType):
    """What Megatron's modules get as ``torch``: factories that read the literal ``device="cuda"`` as the CPU.

    torch's own factories stay as they are for everybody else.  A TorchFunctionMode would be less code, but is not
    active in the backward pass of recomputation.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # of a rope's positions under context parallelism; there is nothing to pin for
        return factory(*args, **kwargs)

    return make


_TORCH = _TorchOnCpu("torch")
for _name in ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like"):
    setattr(_TORCH, _name, _on_cpu(getattr(torch, _name)))
