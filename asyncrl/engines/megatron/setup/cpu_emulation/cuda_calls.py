"""Functions of ``torch.cuda`` that raise without CUDA, replaced for the whole process."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


def are_replaced() -> bool:
    """Whether ``replace`` has been called."""
    return isinstance(torch.cuda.current_device, _StandIn)


def replace() -> None:
    """Install the stand-ins for the whole process."""
    stream = _Stream()
    stand_ins: dict[str, Callable[..., Any]] = {
        # device=torch.cuda.current_device() in DDP's buffers, the router and the tensor-parallel mappings.
        "current_device": lambda: _CPU,
        # The MoE token dispatcher creates a side stream and waits for it.
        "current_stream": lambda *args: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *args: None,
        # The tensor-parallel random trackers set seeds and states (tensor_parallel/random.py).
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    }
    for name, function in stand_ins.items():
        setattr(torch.cuda, name, _StandIn(function))
    torch.cuda.Stream = _Stream  # type: ignore[misc,assignment]


class _StandIn:
    """A replacement for a function that raises without CUDA."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Stream:
    """A stream that never waits: on a CPU, a call has finished when it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: "_Stream") -> None:
        pass

    def wait_event(self, event: "_Stream") -> None:
        pass

    def record_event(self) -> "_Stream":
        return self  # ``wait_event`` accepts a stream as well

    def synchronize(self) -> None:
        pass
