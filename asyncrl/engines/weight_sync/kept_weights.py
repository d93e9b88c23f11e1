"""Engines that keep the weights with which they started."""

from typing import Any, NoReturn

from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.types import UpdateReport, Weights


class KeptWeights:
    """A ``WeightUpdater`` that sends nothing.  Engines, also restarted ones, have loaded their weights from files."""

    def __init__(self, membership: EngineMembership[Any]) -> None:
        self._membership = membership

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``."""
        return True

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``."""
        return True

    async def publish(self, weights: Weights) -> UpdateReport:
        """Return at once.  ``weights`` must be those with which the engines started."""
        return UpdateReport(pause_s=0.0, total_s=0.0, num_bytes=0)

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``.  There is no trainer."""

    async def wait_for_rejoined(self) -> NoReturn:
        """Let restarted engines serve again, until cancelled: none of them needs an update."""
        while True:
            await self._membership.wait_for_rejoined()
            self._membership.mark_synced(self._membership.waiting, self._membership.num_changes)
