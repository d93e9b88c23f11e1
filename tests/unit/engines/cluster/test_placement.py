"""The GPUs of each rank and engine, and the flags of a server that shares its GPUs."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from asyncrl.engines.cluster.actors import ABANDON, CONCURRENT, WATCH
from asyncrl.engines.cluster.placement import Layout, Placement, reserve
from asyncrl.engines.listening import loopback_variables, without_proxy
from asyncrl.engines.sglang.launch import SERVER_ENVIRONMENT, RouterLaunch, ServerLaunch, router_command, server_command
from asyncrl.errors import ConfigError


def layout(*, is_shared: bool, device: Literal["cpu", "cuda"] = "cuda", **changes: int) -> Layout:
    return Layout(
        **{"num_ranks": 4, "num_engines": 2, "gpus_per_engine": 2, **changes}, device=device, is_shared=is_shared
    )


class Ray:
    """A stand-in for Ray that returns the options of each actor; bundles are on ``machines``."""

    def __init__(self, machines: str = "aaaaaaaa") -> None:
        self.util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda **chosen: chosen,
                NodeAffinitySchedulingStrategy=lambda node, soft: {"node": node, "soft": soft},
            ),
            placement_group_table=lambda group: {"bundles_to_node_id": dict(enumerate(machines))},
        )

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "this machine")

    def remote(self, kind: type | None = None, **about: Any) -> Any:
        if kind is None:
            return lambda kind: self.remote(kind, **about)
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: options | about))


def placed(layout: Layout, machines: str = "aaaaaaaa") -> list[tuple[int, float]]:
    """The bundle and GPUs of every rank, then of every engine."""
    place: Any = Placement(Ray(machines), layout, "group")  # type: ignore[arg-type]
    actors = [place.rank(object, rank) for rank in range(layout.num_ranks)]
    actors += [place.engine(object, number) for number in range(layout.num_engines)]
    return [(each["scheduling_strategy"]["placement_group_bundle_index"], each["num_gpus"]) for each in actors]


def test_ranks_have_threads_for_concurrent_calls_and_for_pings() -> None:
    place: Any = Placement(Ray(), layout(is_shared=False), "group")  # type: ignore[arg-type]
    assert place.rank(object, 0)["concurrency_groups"] == {CONCURRENT: 1, ABANDON: 1, WATCH: 1}
    assert "concurrency_groups" not in place.engine(object, 0)


def test_the_router_runs_on_this_machine_whatever_other_machines_there_are() -> None:
    place: Any = Placement(Ray(), layout(is_shared=False), "group")  # type: ignore[arg-type]
    assert place.here(object)["scheduling_strategy"] == {"node": "this machine", "soft": False}


def test_without_sharing_every_rank_and_engine_has_separate_gpus() -> None:
    assert layout(is_shared=False).bundles == [{"CPU": 1, "GPU": 1}] * 4 + [{"CPU": 1, "GPU": 2}] * 2
    assert placed(layout(is_shared=False)) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_ranks_own_shared_gpus_and_the_engine_is_placed_in_their_bundle() -> None:
    assert layout(is_shared=True).bundles == [{"CPU": 3, "GPU": 2}] * 2
    assert placed(layout(is_shared=True)) == [(0, 1), (0, 1), (1, 1), (1, 1), (0, 0), (1, 0)]


def test_without_a_trainer_only_engines_have_gpus() -> None:
    alone = layout(is_shared=False, num_ranks=0)
    assert alone.bundles == [{"CPU": 1, "GPU": 2}] * 2
    assert placed(alone) == [(0, 2), (1, 2)]


def test_tensor_parallel_ranks_are_in_one_bundle() -> None:
    apart = layout(is_shared=False, tensor_parallel=2)
    assert apart.bundles == [{"CPU": 2, "GPU": 2}] * 2 + [{"CPU": 1, "GPU": 2}] * 2
    assert placed(apart) == [(0, 1), (0, 1), (1, 1), (1, 1), (2, 2), (3, 2)]


def test_a_bundle_has_whole_engines_and_whole_tensor_parallel_groups() -> None:
    small_engines = layout(is_shared=True, num_engines=4, gpus_per_engine=1, tensor_parallel=2)
    assert small_engines.bundles == [{"CPU": 4, "GPU": 2}] * 2
    assert placed(small_engines)[4:] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    large_engines = layout(is_shared=True, num_engines=1, gpus_per_engine=4, tensor_parallel=2)
    assert large_engines.bundles == [{"CPU": 5, "GPU": 4}]


def test_ranks_in_a_row_share_a_machine_wherever_their_bundles_are() -> None:
    assert placed(layout(is_shared=False), "abab..") == [(0, 1), (2, 1), (1, 1), (3, 1), (4, 2), (5, 2)]
    assert placed(layout(is_shared=False), "abba..")[:4] == [(0, 1), (3, 1), (1, 1), (2, 1)]
    assert placed(layout(is_shared=False), "baaa..")[:4] == [(1, 1), (2, 1), (3, 1), (0, 1)]
    shared = layout(is_shared=True, num_engines=4, gpus_per_engine=1)
    assert placed(shared, "abab") == [*[(0, 1), (2, 1), (1, 1), (3, 1)], *[(0, 0), (2, 0), (1, 0), (3, 0)]]


def test_an_engine_that_no_machine_can_hold_is_refused() -> None:
    ray: Any = Ray()
    ray.cluster_resources = lambda: {"CPU": 96, "GPU": 24}
    machines = [{"Alive": True, "Resources": {"CPU": 32, "GPU": 8}}] * 3
    ray.nodes = lambda: [*machines, {"Alive": False, "Resources": {"CPU": 32, "GPU": 16}}]
    with pytest.raises(ConfigError, match="rollout-num-gpus-per-engine 16: the largest machine has 8 GPUs"):
        asyncio.run(reserve(ray, layout(is_shared=False, num_engines=1, gpus_per_engine=16), 1.0))


def test_on_a_cpu_ranks_and_engines_are_placed_in_the_same_way() -> None:
    assert layout(is_shared=True, device="cpu").bundles == [{"CPU": 3}] * 2
    assert placed(layout(is_shared=True, device="cpu")) == [(0, 0), (0, 0), (1, 0), (1, 0), (0, 0), (1, 0)]


def test_the_router_asks_no_proxy() -> None:
    launch = RouterLaunch(worker_urls=("http://10.0.0.1:1",), host="10.0.0.2", port=2, prometheus_port=3, key="k")
    environment = router_command(launch).environment
    assert {name.lower() for name in environment} == {"http_proxy", "https_proxy", "all_proxy"}
    assert set(environment.values()) == {""}


def test_a_server_on_shared_gpus_is_told_which_and_gives_memory_back() -> None:
    def command(device: Literal["cpu", "cuda"], gpus: tuple[str, ...] | None) -> Any:
        dtype: Literal["float32", "bfloat16"] = "bfloat16" if device == "cuda" else "float32"
        launch = ServerLaunch(
            model_path=Path("m"), port=1, key="k", nccl_port=2, device=device, dtype=dtype, seed=1, shared_gpus=gpus
        )
        return server_command(launch)

    shared = command("cuda", ("5", "2"))
    assert shared.environment["CUDA_VISIBLE_DEVICES"] == "5,2"
    assert shared.environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert "--enable-memory-saver" in shared.arguments
    assert "--enable-draft-weights-cpu-backup" in shared.arguments
    direct = without_proxy("127.0.0.1", "localhost")
    assert command("cuda", None).environment == SERVER_ENVIRONMENT | loopback_variables("127.0.0.1") | direct
    assert "--enable-memory-saver" not in command("cuda", None).arguments
    on_cpu = command("cpu", ())
    assert on_cpu.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "--enable-memory-saver" not in on_cpu.arguments
