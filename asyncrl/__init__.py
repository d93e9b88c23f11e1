"""An asyncio-first asynchronous RL trainer for large language models: SGLang generates while Megatron trains.

    import asyncrl
    async for step in asyncrl.Run("configs/quickstart.toml", num_rollout=4).steps(): ...

The names of the Python API are imported when they are first used, because every process of a run imports this module.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.api.run import Run, Step, Steps

__all__ = ["Run", "Step", "Steps"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from asyncrl.api import run

        return getattr(run, name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
