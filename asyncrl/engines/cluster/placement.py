"""Placement of processes on the cluster's GPUs, all reserved before the first process starts.

    apart     tensor-parallel ranks │ tensor-parallel ranks │ ... │ engine on its GPUs │ engine on its GPUs │ ...
    shared    engine and its ranks │ engine and its ranks │ ...

Ray places a bundle on one machine, and gives a GPU to one actor only.  Shared GPUs belong to the ranks; their engine
gets the GPUs' ids.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm
from types import ModuleType
from typing import Any, Literal

from asyncrl.engines.cluster.actors import ABANDON, CONCURRENT, WATCH
from asyncrl.engines.cluster.calls import answered
from asyncrl.errors import ConfigError, ServerFailed
from asyncrl.internals import Internal

INTERNALS = (Internal(name="ray._private.state.GlobalState", attributes=("bundles_to_node_id",), used_in=__name__),)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)

TOGETHER_S = 20.0
"""Seconds to wait for machines with room for whole tensor-parallel groups.  Ray answers within 1 s if there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The processes to place, and their GPUs."""

    device: Literal["cpu", "cuda"]
    """The kind of device.  On a CPU everything is placed in the same way, without GPUs."""
    num_ranks: int
    num_engines: int
    gpus_per_engine: int
    is_shared: bool
    """Whether engine i uses the GPUs of the next ``gpus_per_engine`` ranks, in order."""
    tensor_parallel: int = 1
    """The number of consecutive ranks that share every layer.

    On two machines, each layer would send data over the network between them.
    """

    @property
    def ranks_together(self) -> int:
        """The number of ranks in one bundle."""
        return lcm(self.tensor_parallel, self.gpus_per_engine if self.is_shared else 1)

    @property
    def num_rank_bundles(self) -> int:
        """The number of bundles with ranks, which come first."""
        return self.num_ranks // self.ranks_together

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources of each bundle, as requested from Ray."""
        together = self.ranks_together
        num_engines = together // self.gpus_per_engine if self.is_shared else 0
        ranks = [self._bundle(together, together + num_engines)] * self.num_rank_bundles
        return ranks + ([] if self.is_shared else [self._bundle(self.gpus_per_engine, 1)] * self.num_engines)

    def _bundle(self, gpus: int, actors: int) -> dict[str, float]:
        return {"CPU": actors, "GPU": gpus} if self.device == "cuda" else {"CPU": actors}


class Placement:
    """Reserved resources.  Each actor takes its share when it is created."""

    def __init__(self, ray: ModuleType, layout: Layout, group: Any) -> None:
        self._ray = ray
        self._layout = layout
        self._group = group
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        self._rank_bundles = _by_machine([nodes[bundle] for bundle in range(layout.num_rank_bundles)])
        self.is_single_node = sum(node["Alive"] for node in ray.nodes()) == 1

    def rank(self, kind: type, rank: int) -> Any:
        """Create an actor of ``kind`` for a trainer rank, with its GPU."""
        bundle = self._rank_bundles[rank // self._layout.ranks_together]
        return self._actor(
            self._ray.remote(concurrency_groups={CONCURRENT: 1, ABANDON: 1, WATCH: 1})(kind), bundle, gpus=1
        )

    def engine(self, kind: type, number: int) -> Any:
        """Create an actor for an engine, with its GPUs or, if shared, in the bundle of the ranks that have them."""
        layout = self._layout
        if layout.is_shared:
            bundle = self._rank_bundles[number * layout.gpus_per_engine // layout.ranks_together]
            return self._actor(self._ray.remote(kind), bundle, gpus=0)
        return self._actor(self._ray.remote(kind), layout.num_rank_bundles + number, gpus=layout.gpus_per_engine)

    def here(self, kind: type) -> Any:
        """Create an actor on this program's machine, without reserved resources.

        On another machine, it could be lost with that machine.  If that joined the cluster after the start of a run on
        one machine, servers there could not be reached: they would listen on the loopback interface.
        """
        node = self._ray.get_runtime_context().get_node_id()
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return self._ray.remote(kind).options(num_cpus=0, scheduling_strategy=strategy).remote()

    def kill(self, actor: Any) -> None:
        """End an actor at once.  No-op if it has ended."""
        self._ray.kill(actor)

    def release_resources(self) -> None:
        """End trainer ranks and engines, and free their resources.  The router has no reserved resources."""
        self._ray.util.remove_placement_group(self._group)

    def _actor(self, remote: Any, bundle: int, gpus: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )
        options = {
            "num_cpus": 1,
            "num_gpus": gpus if self._layout.device == "cuda" else 0,
            "scheduling_strategy": strategy,
        }
        return remote.options(**options).remote()


async def reserve(ray: ModuleType, layout: Layout, timeout_s: float, together_s: float = TOGETHER_S) -> Placement:
    """Reserve resources for ``layout``.

    Raises ConfigError if the cluster is too small, or ServerFailed if its resources are not free within ``timeout_s``.

    If no machines with room for whole tensor-parallel groups are found within ``together_s``, ranks are placed one by
    one.  They work as well, but slower.
    """
    needed, total = _sum(layout.bundles), ray.cluster_resources()
    if any(total.get(kind, 0) < count for kind, count in needed.items()):
        hint = "; --device cpu needs no GPU" if needed["GPU"] else ""
        raise ConfigError(f"the run needs {_shown(needed)}, the cluster has {_shown(total)}{hint}")
    _check_engines(layout, ray.nodes())
    apart = replace(layout, tensor_parallel=1)
    if layout.bundles != apart.bundles:
        try:
            return Placement(ray, layout, await _group(ray, layout, min(together_s, timeout_s)))
        except ServerFailed:
            logger.warning(
                "no machines were found with room for %d trainer ranks each (tensor-model-parallel-size %d): "
                "ranks that share layers may be on several machines, which is slower",
                layout.ranks_together,
                layout.tensor_parallel,
            )
    try:
        return Placement(ray, apart, await _group(ray, apart, timeout_s))
    except ServerFailed as error:
        free = _shown(ray.available_resources())
        raise ServerFailed(f"{error}: the run needs {_shown(needed)}, free are {free}") from error


async def _group(ray: ModuleType, layout: Layout, timeout_s: float) -> Any:
    """Return Ray's placement group of reserved bundles.  Raises ServerFailed."""
    group = ray.util.placement_group(layout.bundles, strategy="PACK")
    try:
        await answered(group.ready(), "placement", timeout_s, ServerFailed)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def _check_engines(layout: Layout, nodes: list[dict[str, Any]]) -> None:
    """Raise ConfigError if an engine needs more GPUs than any machine has."""
    largest = max(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"])
    if layout.device == "cuda" and layout.gpus_per_engine > largest:
        raise ConfigError(
            f"rollout-num-gpus-per-engine {layout.gpus_per_engine}: the largest machine has {largest:g} GPUs, and an "
            "engine does not span machines"
        )


def _by_machine(machines: list[str]) -> tuple[int, ...]:
    """Return the bundles' indices, grouped by machine; the machine with the most bundles comes first."""
    found: dict[str, list[int]] = {}
    for bundle, machine in enumerate(machines):
        found.setdefault(machine, []).append(bundle)
    groups = sorted(found.values(), key=len, reverse=True)
    return tuple(chain.from_iterable(groups))


def _sum(bundles: list[dict[str, float]]) -> dict[str, float]:
    return {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}


def _shown(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
