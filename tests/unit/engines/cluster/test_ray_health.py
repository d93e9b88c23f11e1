"""The end of Ray's processes is noticed at once, and that of a joined cluster unless it comes back."""

import asyncio
import errno
import subprocess
import time

import pytest

from asyncrl.engines.cluster import ray_health
from asyncrl.engines.cluster.ray_health import RayHealth, own_parts
from tests.ports import free_ports
from tests.virtual_time import run_virtually


def test_the_end_of_a_process_is_noticed_as_it_happens() -> None:
    async def ended(process: subprocess.Popen[bytes]) -> tuple[str, float]:
        health = RayHealth({"GCS": process.pid}, {})
        asyncio.get_running_loop().call_later(0.1, process.kill)
        began = time.monotonic()
        said = await health.ended()
        assert health.problem == said
        return said, time.monotonic() - began

    with subprocess.Popen(["sleep", "100"]) as process:
        said, seconds = asyncio.run(ended(process))
    assert said == f"Ray's GCS (process {process.pid}) has ended"
    assert seconds < 2.0


def test_a_process_that_has_ended_before_is_noticed() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert "has ended" in asyncio.run(RayHealth({"raylet": process.pid}, {}).ended())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_container_without_pidfd_is_looked_at_within_five_seconds(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise OSError(number, "not here")

    async def ended(process: subprocess.Popen[bytes]) -> str:
        asyncio.get_running_loop().call_later(0.1, process.kill)
        async with asyncio.timeout(5.0):
            said = await RayHealth({"GCS": process.pid}, {}).ended()
        assert not ray_health._is_running(process.pid)  # noqa: SLF001
        return said

    monkeypatch.setattr("os.pidfd_open", refused)
    with subprocess.Popen(["sleep", "100"]) as process:
        assert asyncio.run(ended(process)) == f"Ray's GCS (process {process.pid}) has ended"


async def _silent(seconds: float | None) -> str:
    """Watch the port of a GCS that does not listen for some seconds, or never again, and return the line.

    A port of ``free_ports``: no other socket gets it meanwhile, and no attempt to connect to it meets itself.
    """
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", free_ports(1)[0])
    host, port = server.sockets[0].getsockname()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(RayHealth({}, {"GCS": (host, port)}).ended())
        await asyncio.sleep(0.1)
        server.close()
        if seconds is None:
            return await watching
        await asyncio.sleep(seconds)
        async with await asyncio.start_server(lambda reader, writer: writer.close(), host, port):
            await asyncio.sleep(1.5)
            assert not watching.done()
            watching.cancel()
            return "running"


def test_a_gcs_that_is_restarted_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_health, "TRY_EVERY_S", 0.05)
    monkeypatch.setattr(ray_health, "UNREACHABLE_S", 1.5)
    assert asyncio.run(_silent(0.5)) == "running"


def test_a_joined_cluster_that_stays_away_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 30.0 <= ray_health.UNREACHABLE_S <= 50.0  # of the 60 s after which Ray ends the driver
    monkeypatch.setattr(ray_health, "TRY_EVERY_S", 0.05)
    monkeypatch.setattr(ray_health, "UNREACHABLE_S", 1.0)
    said = asyncio.run(_silent(None))
    assert said.startswith("Ray's GCS at 127.0.0.1:")
    assert said.endswith(" could not be reached for 1 s")


def test_a_run_without_parts_waits_for_ever() -> None:
    async def waits() -> bool:
        try:
            async with asyncio.timeout(1000.0):
                await RayHealth({}, {}).ended()
        except TimeoutError:
            return True
        return False

    assert run_virtually(waits())[0]


def test_a_process_without_ray_has_no_parts() -> None:
    assert own_parts() == {}
