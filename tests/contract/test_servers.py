"""Server processes leave nothing behind; their command lines and flags are those of the installed SGLang."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import pytest

from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.launch import RouterLaunch, ServerLaunch, router_command, server_command
from asyncrl.engines.sglang.server_flags import known_router_flags, known_server_flags
from asyncrl.errors import ServerFailed
from tests.contract.conftest import Servers

DEAD_IN_S = 5.0
"""Without being asked kindly: an SGLang that is takes longer."""
WITH_CHILD = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"


def until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def session_of(pid: int) -> list[int]:
    members = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except ProcessLookupError:
            continue
    return members


def start(code: str, folder: Path) -> ServerProcess:
    return ServerProcess("server", [sys.executable, "-c", code], {"GREETING": "hello"}, folder / "logs" / "server.log")


def test_stopping_a_server_ends_its_whole_process_tree(tmp_path: Path) -> None:
    server = start(WITH_CHILD, tmp_path)
    until(lambda: "up" in server.tail())
    assert len(session_of(server.pid)) == 2
    assert server.is_alive()
    began = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - began < DEAD_IN_S
    assert not server.is_alive()
    assert not session_of(server.pid)


def test_children_are_found_also_when_their_parent_is_gone(tmp_path: Path) -> None:
    server = start(f"print('ImportError: of no importance'); {WITH_CHILD}", tmp_path)
    until(lambda: "up" in server.tail())
    os.kill(server.pid, 9)
    until(lambda: not server.is_alive())
    with pytest.raises(ServerFailed, match=r"server was ended by signal 9, Killed \(log: "):
        server.raise_if_dead()
    server.stop()
    assert not session_of(server.pid)


def test_a_server_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from asyncrl.engines.server_process import ServerProcess;"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        f"s = ServerProcess('s', sleep, {{}}, Path({str(tmp_path / 'log')!r}));"
        "print(s.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    until(lambda: not session_of(int(done.stdout)))


def test_on_a_cpu_a_server_forks_its_children(servers: Servers) -> None:
    port = servers.engine_url.rpartition(":")[2]
    every = psutil.process_iter(["cmdline"])  # of one that has just ended it is None
    (main,) = (each for each in every if {"sglang.launch_server", port} <= set(each.info["cmdline"] or ()))
    children = [" ".join(child.cmdline()) for child in main.children(recursive=True)]
    assert any("sglang::scheduler" in child for child in children)
    assert not any("spawn_main" in child for child in children)  # each of which would import all of SGLang again


def test_a_dead_server_says_why(tmp_path: Path) -> None:
    server = start("import os; print(os.environ['GREETING']); raise RuntimeError('no memory')", tmp_path)
    until(lambda: not server.is_alive())
    assert "hello" in server.tail()
    with pytest.raises(ServerFailed, match="server ended with code 1: RuntimeError: no memory"):
        server.raise_if_dead()


ENDS_ITSELF = "import os; print({!r}, flush=True); os.kill(os.getpid(), 9)"
RAN_OUT = "torch.OutOfMemoryError: CUDA out of memory."
SIGQUIT = "[10:00] Received sigquit from a child process. It usually means the child failed."
DISABLED = "[09:00] OpenAI Responses API disabled (ModuleNotFoundError: No module named 'openai_harmony')"
WHAT = "what():  NCCL error: remote process exited"
ABORTED = "[10:00] Subprocess scheduler_0 (pid=3420) crashed with exit code -6. Triggering SIGQUIT for cleanup..."
CRASHED = "[10:00] Subprocess scheduler_0 (pid=3420) crashed with exit code -9. Triggering SIGQUIT for cleanup..."


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (f"{RAN_OUT}\n{SIGQUIT}", RAN_OUT),
        (f"{DISABLED}\n{CRASHED}\nNo live scheduler", CRASHED),
        (f"terminate called\n{WHAT}\nFatal Python error: Aborted\n{ABORTED}", WHAT),
        (f"{DISABLED}\n{ABORTED}\nNo live scheduler", ABORTED),
        (f"{RAN_OUT}\n{CRASHED}", CRASHED),
        (f"{DISABLED}\n[10:00] error: --tp-size 3\n{SIGQUIT}", "[10:00] error: --tp-size 3"),
        (f"{DISABLED}\n{SIGQUIT}", SIGQUIT),
        (f"Exception: {'x' * 1000}\n{SIGQUIT}", f"Exception: {'x' * 289}..."),
    ],
    ids=[
        "an exception",
        "a child was killed",
        "a child aborted",
        "a child aborted without a word",
        "a child was killed after an exception that it survived",
        "an error",
        "no more than a mention",
        "a long line",
    ],
)
def test_a_server_that_killed_itself_says_why(tmp_path: Path, written: str, said: str) -> None:
    """SGLang kills itself with SIGKILL when one of its children has failed."""
    server = start(ENDS_ITSELF.format(written), tmp_path)
    until(lambda: not server.is_alive())
    with pytest.raises(ServerFailed) as error:
        server.raise_if_dead()
    assert str(error.value).startswith(f"server was ended by signal 9, Killed: {said} (log: ")


def test_mentions_of_signals_in_a_log_are_not_a_cause_of_death(tmp_path: Path) -> None:
    server = start(ENDS_ITSELF.format("server_args=ServerArgs(custom_sigquit_handler=None)"), tmp_path)
    until(lambda: not server.is_alive())
    with pytest.raises(ServerFailed, match=r"Killed \(log: "):
        server.raise_if_dead()


def test_a_deleted_log_does_not_hide_the_signal(tmp_path: Path) -> None:
    server = start(ENDS_ITSELF.format("up"), tmp_path)
    until(lambda: not server.is_alive())
    server.log_path.unlink()
    with pytest.raises(ServerFailed, match=r"Killed \(log: "):
        server.raise_if_dead()


def test_the_log_of_an_earlier_server_is_not_a_cause_of_death(tmp_path: Path) -> None:
    first = start(ENDS_ITSELF.format(f"{RAN_OUT}\n{SIGQUIT}"), tmp_path)
    until(lambda: not first.is_alive())
    second = start(ENDS_ITSELF.format("up"), tmp_path)
    until(lambda: not second.is_alive())
    with pytest.raises(ServerFailed, match=r"Killed \(log: "):
        second.raise_if_dead()


def test_a_program_that_is_not_there_is_a_server_failure(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="server did not start"):
        ServerProcess("server", ["/no/such/program"], {}, tmp_path / "log")


def test_ranks_rendezvous_at_the_given_port(servers: Servers) -> None:
    with socket.create_connection(("127.0.0.1", servers.nccl_port), timeout=10) as connection:
        assert connection.getpeername() == ("127.0.0.1", servers.nccl_port)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_flag_of_ours_is_known_to_the_installed_sglang(device: Literal["cpu", "cuda"]) -> None:
    launch = ServerLaunch(model_path=Path("m"), port=1, nccl_port=2, device=device, dtype="float32", seed=1)
    assert flags(server_command(launch).arguments) <= known_server_flags()
    router = RouterLaunch(worker_urls=("http://x",), port=1, prometheus_port=2)
    assert flags(router_command(router).arguments) <= known_router_flags()


def test_the_users_flags_win() -> None:
    users: dict[str, str | bool] = {"stream-interval": "4", "disable-overlap-schedule": False, "enable-metrics": True}
    launch = ServerLaunch(model_path=Path("m"), port=1, nccl_port=2, device="cpu", dtype="float32", seed=1, flags=users)
    arguments = server_command(launch).arguments
    assert arguments[arguments.index("--stream-interval") + 1] == "4"
    assert "--disable-overlap-schedule" not in arguments
    assert arguments[-1] == "--enable-metrics"


def test_known_flags_are_read_fast_and_without_importing_sglang() -> None:
    code = (
        "import sys, time; began = time.process_time();"
        "from asyncrl.engines.sglang.server_flags import known_server_flags as server, known_router_flags as router;"
        "assert {'mem-fraction-static', 'tp-size', 'model', 'config'} <= server();"
        "assert {'policy', 'cache-threshold', 'worker-urls'} <= router();"
        "assert not {'torch', 'sglang', 'sglang_router'} & set(sys.modules);"
        "print(time.process_time() - began)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert float(done.stdout) < 5.0  # 0.3 s on an idle core


def flags(arguments: tuple[str, ...]) -> set[str]:
    return {argument[2:] for argument in arguments if argument.startswith("--")}
