"""The first update of a deployment, to engines that have just started."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engines.cluster.deployment import Running
from asyncrl.errors import UpdateInterrupted, WeightUpdateFailed
from asyncrl.types import Weights

FIRST = Weights(version=0, step=0)


class Updater:
    """An updater whose calls of ``publish`` raise ``errors``, one each, before one succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.told: list[str] = []
        self._errors = list(errors)

    async def snapshot(self) -> None:
        self.told.append("snapshot")

    async def publish(self, weights: Weights) -> None:
        self.told.append(f"publish {weights.version}")
        if self._errors:
            raise self._errors.pop(0)


def running(updater: Updater) -> Running:
    rest: Any = SimpleNamespace()
    return Running(
        engine=rest,
        key="",
        trainer=rest,
        ranks=rest,
        updater=updater,  # type: ignore[arg-type]
        load_probe=rest,
        supervisor=rest,
        release_resources=lambda: None,
    )


def test_the_first_update_is_restarted_when_an_engine_is_lost_during_it() -> None:
    updater = Updater(UpdateInterrupted("b: gone"))
    asyncio.run(running(updater).serve(FIRST))
    assert updater.told == ["snapshot", "publish 0", "snapshot", "publish 0"]


def test_any_other_failure_of_the_first_update_is_final() -> None:
    updater = Updater(WeightUpdateFailed("no group"))
    with pytest.raises(WeightUpdateFailed, match="no group"):
        asyncio.run(running(updater).serve(FIRST))
    assert updater.told == ["snapshot", "publish 0"]
