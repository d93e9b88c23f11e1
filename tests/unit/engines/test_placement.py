"""Who gets which GPUs, and what a server is told that shares its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from asyncrl.engines.cluster.actors import BESIDE
from asyncrl.engines.cluster.placement import Layout, Placement
from asyncrl.engines.sglang.launch import SERVER_ENVIRONMENT, ServerLaunch, server_command


def layout(*, is_shared: bool, device: Literal["cpu", "cuda"] = "cuda") -> Layout:
    return Layout(device=device, num_ranks=4, num_engines=2, gpus_per_engine=2, is_shared=is_shared)


class Ray:
    """Says what an actor would be made with."""

    def __init__(self) -> None:
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **chosen: chosen)
        self.util = SimpleNamespace(scheduling_strategies=strategies)

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}]

    def remote(self, kind: type | None = None, **about: Any) -> Any:
        if kind is None:
            return lambda kind: self.remote(kind, **about)
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: options | about))


def placed(layout: Layout) -> list[tuple[int, float]]:
    """Bundle and GPUs of every rank, then of every engine."""
    place: Any = Placement(Ray(), layout, "group")  # type: ignore[arg-type]
    actors = [place.rank(object, rank) for rank in range(4)] + [place.engine(object, number) for number in range(2)]
    return [(each["scheduling_strategy"]["placement_group_bundle_index"], each["num_gpus"]) for each in actors]


def test_ranks_have_a_second_thread() -> None:
    place: Any = Placement(Ray(), layout(is_shared=False), "group")  # type: ignore[arg-type]
    assert place.rank(object, 0)["concurrency_groups"] == {BESIDE: 1}
    assert "concurrency_groups" not in place.engine(object, 0)


def test_apart_everyone_has_gpus_of_its_own() -> None:
    assert layout(is_shared=False).bundles == [{"CPU": 1, "GPU": 1}] * 4 + [{"CPU": 1, "GPU": 2}] * 2
    assert placed(layout(is_shared=False)) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_shared_gpus_belong_to_the_ranks_and_the_engine_is_beside_them() -> None:
    assert layout(is_shared=True).bundles == [{"CPU": 3, "GPU": 2}] * 2
    assert placed(layout(is_shared=True)) == [(0, 1), (0, 1), (1, 1), (1, 1), (0, 0), (1, 0)]


def test_on_a_cpu_they_are_placed_in_the_same_way() -> None:
    assert layout(is_shared=True, device="cpu").bundles == [{"CPU": 3}] * 2
    assert placed(layout(is_shared=True, device="cpu")) == [(0, 0), (0, 0), (1, 0), (1, 0), (0, 0), (1, 0)]


def test_a_server_on_shared_gpus_is_told_which_and_gives_memory_back() -> None:
    def command(device: Literal["cpu", "cuda"], gpus: tuple[str, ...] | None) -> Any:
        dtype: Literal["float32", "bfloat16"] = "bfloat16" if device == "cuda" else "float32"
        launch = ServerLaunch(
            model_path=Path("m"), port=1, nccl_port=2, device=device, dtype=dtype, seed=1, shared_gpus=gpus
        )
        return server_command(launch)

    shared = command("cuda", ("5", "2"))
    assert shared.environment["CUDA_VISIBLE_DEVICES"] == "5,2"
    assert shared.environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert "--enable-memory-saver" in shared.arguments
    assert command("cuda", None).environment == SERVER_ENVIRONMENT
    assert "--enable-memory-saver" not in command("cuda", None).arguments
    on_cpu = command("cpu", ())
    assert on_cpu.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "--enable-memory-saver" not in on_cpu.arguments
