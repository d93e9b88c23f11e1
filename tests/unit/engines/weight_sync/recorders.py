"""Engines and trainers that record their commands, for the tests of weight updates."""

from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.path_check import Meeting
from asyncrl.engines.weight_sync.round import PauseMode
from tests.steps import Step, nothing


class Recorder:
    """A member of an update that records each command in ``told`` and then runs ``step`` with it."""

    def __init__(self, step: Step = nothing) -> None:
        self.told: list[str] = []
        self._step = step

    async def _do(self, what: str) -> None:
        self.told.append(what)
        await self._step(what)


class PausableRecorder(Recorder):
    """An engine that can be paused."""

    def __init__(self, url: str, step: Step = nothing) -> None:
        super().__init__(step)
        self.url = url

    async def pause(self, mode: PauseMode) -> None:
        await self._do(f"pause {mode}")

    async def continue_generation(self) -> None:
        await self._do("continue")

    async def meet_trainer(self, where: Meeting) -> bool:
        """Meet the trainer at once."""
        return True


class TwoBuckets:
    """A trainer whose weights are two buckets, and which meets every engine at once."""

    async def meet_engine(self, where: Meeting, *, timeout_s: float) -> None:
        pass

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        return tuple(
            WeightBucket(names=(name,), dtypes=("float32",), shapes=((2,),), num_bytes=8) for name in ("one", "two")
        )
