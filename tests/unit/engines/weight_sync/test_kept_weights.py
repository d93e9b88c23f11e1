"""Engines that keep their weights serve again as soon as they have restarted."""

import asyncio
from dataclasses import dataclass

from asyncrl.engines.weight_sync.kept_weights import KeptWeights
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.types import UpdateReport, Weights
from tests.virtual_time import run_virtually


@dataclass(frozen=True)
class Engine:
    url: str


def test_a_restarted_engine_waits_for_no_update() -> None:
    async def main() -> None:
        membership = EngineMembership([Engine("a"), Engine("b")])
        async with asyncio.TaskGroup() as tasks:
            welcoming = tasks.create_task(KeptWeights(membership).wait_for_rejoined())
            for _ in range(2):
                membership.mark_lost("a")
                await asyncio.sleep(1.0)
                membership.mark_restarted("a")
                assert membership.waiting
                await membership.wait_until_synced("a")
            assert not welcoming.done()
            welcoming.cancel()

    run_virtually(main())


def test_an_update_sends_nothing() -> None:
    async def main() -> UpdateReport:
        updater = KeptWeights(EngineMembership([Engine("a")]))
        assert await updater.snapshot()
        assert await updater.resnapshot()
        return await updater.publish(Weights(version=0, step=0))

    assert asyncio.run(main()) == UpdateReport(pause_s=0.0, total_s=0.0, num_bytes=0)
