"""Time-sharing of the same GPUs between trainer and engines.

    holder   engines                                trainer
    trainer  nothing on the GPUs ◀── release        weights, gradients, optimizer ◀── from host memory
    update   weights             ◀── resume         weights; the rest moves to host memory
    engines  weights and caches  ◀── resume         nothing: the weights move to host memory, too

Some memory stays on a GPU whoever holds it:

- Both processes' CUDA contexts and NCCL's buffers.
- The trainer's memory other than weights, gradients and optimizer (``engines/megatron/train/offload``).
- The engines' memory that SGLang does not allocate in its memory saver.

Uses neither HTTP nor torch: engines and trainer are Protocols.
"""

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol

from asyncrl.engines.gather import gather
from asyncrl.errors import GpuSharingFailed
from asyncrl.event_loop import loop_time

logger = logging.getLogger(__name__)

WEIGHTS: Sequence[str] = ("weights",)
CACHES: Sequence[str] = ("kv_cache", "cuda_graph")
"""SGLang's tags for the parts of its memory."""

GpuHolder = Literal["trainer", "update", "engines"]
"""The current holder of the GPUs; ``update`` while trainer and engines both have their weights there."""


class MemoryLender(Protocol):
    """One engine's side of the sharing.  Every command raises EngineTimeout, EngineLost or EngineRejected."""

    url: str

    async def empty(self) -> None:
        """Return once the engine has no requests and has flushed their KV cache."""

    async def release(self, parts: Sequence[str]) -> None:
        """Release GPU memory and its contents.  Kills the engine if it has a request."""

    async def resume(self, parts: Sequence[str]) -> None:
        """Allocate released GPU memory again; its contents are undefined."""


class MemoryOwner(Protocol):
    """The trainer's side of the sharing.  Every method raises TrainerFailed."""

    async def fetch(self) -> None:
        """Move all of the trainer's memory to the GPUs."""

    async def put_away_optimizer(self) -> None:
        """Move the optimizer to host memory and free the gradients."""

    async def put_away_weights(self) -> None:
        """Move the weights to host memory."""


class SharedGpus:
    """``GpuSharing`` of a trainer and all engines.  At most one call at a time."""

    def __init__(
        self, engines: Sequence[MemoryLender], trainer: MemoryOwner, *, holder: GpuHolder, timeout_s: float
    ) -> None:
        """Start with the GPUs at ``holder``; ``timeout_s`` is the deadline of each request to engines and trainer."""
        self.holder: GpuHolder = holder
        self._engines = tuple(engines)
        self._trainer = trainer
        self._timeout_s = timeout_s

    async def acquire_for_training(self) -> None:
        """See ``GpuSharing.acquire_for_training``."""
        if self.holder == "trainer":
            return
        if self.holder == "update":
            raise AssertionError("engines must receive the new weights before the next training step")
        start = loop_time()
        await release_engines(self._engines, self._timeout_s)
        await self._ask("fetching the trainer's memory", self._trainer.fetch())
        self._pass_to("trainer", start)

    async def acquire_for_update(self) -> None:
        """See ``GpuSharing.acquire_for_update``."""
        if self.holder == "update":
            return
        if self.holder == "engines":
            raise AssertionError("the trainer has no memory to take weights from")
        start = loop_time()
        await self._ask("putting the optimizer away", self._trainer.put_away_optimizer())
        await self._all("resuming weights", lambda engine: engine.resume(WEIGHTS))
        self._pass_to("update", start)

    async def acquire_for_generation(self) -> None:
        """See ``GpuSharing.acquire_for_generation``."""
        if self.holder == "engines":
            return
        if self.holder == "trainer":
            raise AssertionError("engines must receive weights before they generate")
        start = loop_time()
        await self._ask("putting the weights away", self._trainer.put_away_weights())
        await self._all("resuming caches", lambda engine: engine.resume(CACHES))
        self._pass_to("engines", start)

    def _pass_to(self, holder: GpuHolder, since: float) -> None:
        logger.info("the GPUs pass to the %s in %.3f s", holder, loop_time() - since)
        self.holder = holder

    async def _ask(self, doing: str, work: Coroutine[Any, Any, None]) -> None:
        await gather(doing, {"trainer": work}, self._timeout_s, GpuSharingFailed)

    async def _all(self, doing: str, ask: Callable[[MemoryLender], Coroutine[Any, Any, None]]) -> None:
        await _all(self._engines, doing, ask, self._timeout_s)


async def release_engines(engines: Sequence[MemoryLender], timeout_s: float) -> None:
    """Have engines without requests release all the memory that they can.  Raises GpuSharingFailed."""
    await _all(engines, "emptying engines", lambda engine: engine.empty(), timeout_s)
    await _all(engines, "releasing memory", lambda engine: engine.release((*WEIGHTS, *CACHES)), timeout_s)


async def _all(
    engines: Sequence[MemoryLender],
    doing: str,
    ask: Callable[[MemoryLender], Coroutine[Any, Any, None]],
    timeout_s: float,
) -> None:
    await gather(doing, {engine.url: ask(engine) for engine in engines}, timeout_s, GpuSharingFailed)
