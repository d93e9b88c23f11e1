"""The nodes and GPUs of trainer and engines."""

from dataclasses import dataclass
from typing import Annotated, Literal

from asyncrl.config.areas.ranges import above, at_least, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The nodes and GPUs of trainer and engines."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], "Device of trainer and engines. auto is GPUs if Ray offers any, else CPUs."
    ] = "auto"
    actor_num_nodes: Annotated[int, "Number of trainer nodes."] = 1
    actor_num_gpus_per_node: Annotated[
        int, "Number of trainer ranks per node: one GPU each, or one process each on CPUs."
    ] = 1
    rollout_num_gpus: Annotated[
        int | None,
        "Number of GPUs of all rollout engines together; on CPUs, number of engines. Default: 1. Without effect with "
        "--colocate, where it is the trainer's number.",
    ] = None
    rollout_num_gpus_per_engine: Annotated[int, "Number of GPUs of one engine (its tensor-parallel size)."] = 1
    colocate: Annotated[
        bool,
        "Share the same GPUs between trainer and engines, which alternate: each frees its memory while the other "
        "works. Implies synchronous training (--max-staleness 0).",
    ] = False
    use_router: Annotated[
        bool, "Place sglang-router in front of the engines. If off, requests are spread over the engines in rotation."
    ] = True
    start_timeout_s: Annotated[float, "Time limit for all processes to become ready, in seconds."] = 600.0
    distributed_timeout_minutes: Annotated[float, "Time limit for one collective operation, in minutes."] = 10.0
    gpu_memory_gb: Annotated[
        float,
        "Memory of one GPU in GB (10^9 bytes), for --dry-run. The default is an H200's data sheet; its driver shows "
        "7% more.",
    ] = 141.0

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus")
            + at_least(self, 1, "rollout_num_gpus_per_engine")
            + above(self, 0, "start_timeout_s", "distributed_timeout_minutes", "gpu_memory_gb")
        )

    @property
    def num_trainer_ranks(self) -> int:
        """The number of trainer ranks over all nodes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def num_rollout_gpus(self) -> int:
        """The number of GPUs of all rollout engines together."""
        if self.colocate:
            return self.num_trainer_ranks
        return 1 if self.rollout_num_gpus is None else self.rollout_num_gpus

    @property
    def num_engines(self) -> int:
        """The number of rollout engines, on GPUs or CPUs."""
        return self.num_rollout_gpus // self.rollout_num_gpus_per_engine
