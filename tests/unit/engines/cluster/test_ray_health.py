"""The end of Ray's processes is noticed at once, and that of a joined cluster within seconds."""

import asyncio
import subprocess
import time

from asyncrl.engines.cluster.ray_health import RayHealth, own_parts
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


def test_a_port_that_nothing_listens_at_is_noticed_within_five_seconds() -> None:
    async def ended() -> str:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        health = RayHealth({}, {"GCS": address})
        asyncio.get_running_loop().call_later(0.5, server.close)
        async with asyncio.timeout(5.0):
            return await health.ended()

    assert "Ray's GCS at 127.0.0.1:" in asyncio.run(ended())


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
