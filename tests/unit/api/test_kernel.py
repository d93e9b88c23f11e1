"""An interrupt of a real Jupyter kernel ends the run that its cell follows, and nothing else."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[3]
START_S = 150.0
DEFINED = """
from functools import partial
from asyncrl.api.process import RunProcess
from asyncrl.api.run import Steps

actions, program = ["end-on-sigterm", "row:0", "sleep:50"], ("-m", "tests.unit.api.speaker")
started = partial(RunProcess, actions, grace_s=0.0, shows_output=False, program=program)
"""
LOOP = "for step in Steps(started): print('step', step.number, flush=True)"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Sockets in a folder: another process may take a TCP port before the kernel listens on it.
    manager = KernelManager(transport="ipc", ip=str(tmp_path_factory.mktemp("kernel") / "socket"))
    manager.start_kernel(cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=START_S)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def message(client: Any, kind: str) -> dict[str, Any]:
    """Return the content of the kernel's next message of a kind."""
    while True:
        found = client.get_iopub_msg(timeout=START_S)
        if found["header"]["msg_type"] == kind:
            return dict(found["content"])


def speakers(kernel_pid: int) -> list[psutil.Process]:
    children = psutil.Process(kernel_pid).children(recursive=True)
    return [child for child in children if "tests.unit.api.speaker" in child.cmdline()]


def test_an_interrupt_ends_the_run_and_leaves_the_kernel(kernel: Any) -> None:
    # ipykernel 7.4.0 interrupts no cell that awaits, not even a sleep.
    kernel.execute(f"{DEFINED}\n{LOOP}", stop_on_error=False)
    assert message(kernel, "stream")["text"] == "step 0\n"
    [speaker] = speakers(kernel.parent.provisioner.pid)
    time.sleep(0.5)  # until the cell waits for the next step
    kernel.parent.interrupt_kernel()
    assert message(kernel, "error")["ename"] == "KeyboardInterrupt"
    speaker.wait(timeout=30.0)
    kernel.execute("print('alive')")
    assert message(kernel, "stream")["text"] == "alive\n"
