"""Command lines and flags are those of the installed SGLang, and the started server obeys them."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from asyncrl.engines.sglang.launch import (
    Flags,
    RouterLaunch,
    ServerLaunch,
    expert_parallel_size,
    router_command,
    server_command,
)
from asyncrl.engines.sglang.server_flags import known_router_flags, known_server_flags
from tests.sglang_server import START_S, Servers, main_process

pytestmark = pytest.mark.timeout(START_S + 180)


def test_on_a_cpu_a_server_forks_its_children(servers: Servers) -> None:
    children = [" ".join(child.cmdline()) for child in main_process(servers).children(recursive=True)]
    assert any("sglang::scheduler" in child for child in children)
    assert not any("spawn_main" in child for child in children)  # a spawned child would import all of SGLang again


def test_tensor_parallel_ranks_rendezvous_at_the_given_port(servers: Servers) -> None:
    with socket.create_connection(("127.0.0.1", servers.nccl_port), timeout=30) as connection:
        assert connection.getpeername() == ("127.0.0.1", servers.nccl_port)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_flag_of_ours_is_known_to_the_installed_sglang(device: Literal["cpu", "cuda"]) -> None:
    launch = ServerLaunch(
        model_path=Path("m"), port=1, key="k", nccl_port=2, device=device, dtype="float32", seed=1, returns_routes=True
    )
    assert flags(server_command(launch).arguments) <= known_server_flags()
    router = RouterLaunch(worker_urls=("http://x",), port=1, key="k", prometheus_port=2)
    assert flags(router_command(router).arguments) <= known_router_flags()


def test_flags_of_the_user_override_ours() -> None:
    users: dict[str, str | bool] = {"stream-interval": "4", "disable-overlap-schedule": False, "enable-metrics": True}
    launch = ServerLaunch(
        model_path=Path("m"), port=1, key="k", nccl_port=2, device="cpu", dtype="float32", seed=1, flags=users
    )
    arguments = server_command(launch).arguments
    assert arguments[arguments.index("--stream-interval") + 1] == "4"
    assert "--disable-overlap-schedule" not in arguments
    assert arguments[-1] == "--enable-metrics"


def test_a_flag_with_several_words_has_them_as_arguments() -> None:
    users: Flags = {"cuda-graph-bs": ("1", "2", "4"), "enable-metrics": True}
    launch = ServerLaunch(
        model_path=Path("m"), port=1, key="k", nccl_port=2, device="cpu", dtype="float32", seed=1, flags=users
    )
    assert server_command(launch).arguments[-5:] == ("--cuda-graph-bs", "1", "2", "4", "--enable-metrics")


def test_the_expert_parallel_size_has_three_names() -> None:
    for name in ("ep-size", "expert-parallel-size", "ep"):
        assert name in known_server_flags()
        assert expert_parallel_size({name: "8"}) == 8
    assert expert_parallel_size({}) == 1
    assert expert_parallel_size({"ep-size": False}) == 1


def test_known_flags_are_read_fast_and_without_importing_sglang() -> None:
    code = (
        "import sys, time; began = time.process_time();"
        "from asyncrl.engines.sglang.server_flags import known_server_flags as server, known_router_flags as router;"
        "assert {'mem-fraction-static', 'tp-size', 'model', 'config'} <= server();"
        "assert {'policy', 'cache-threshold', 'worker-urls'} <= router();"
        "assert not {'torch', 'sglang', 'sglang_router'} & set(sys.modules);"
        "print(time.process_time() - began)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90)
    assert float(done.stdout) < 5.0  # 0.3 s on an idle core


def flags(arguments: tuple[str, ...]) -> set[str]:
    return {argument[2:] for argument in arguments if argument.startswith("--")}
