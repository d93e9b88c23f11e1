"""The settings of a deployment: what is placed and started, and with which models, keys and deadlines."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.areas import ClusterConfig, FailureConfig
from asyncrl.engines.cluster.placement import Layout
from asyncrl.engines.megatron.checkpoint.directory import Origin
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.sglang.client.routes import RoutesShape
from asyncrl.engines.sglang.installed_plugins import Plugin
from asyncrl.engines.sglang.launch import Flags
from asyncrl.engines.weight_sync.round import PauseMode
from asyncrl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The settings of a deployment."""

    cluster: ClusterConfig
    """The numbers of engines, ranks and GPUs.  The device is the one of ``trainer``, where "auto" is resolved."""
    failures: FailureConfig
    trainer: TrainerSettings
    """The trainer's settings.  Engines serve its model, on the same kind of device and in the same dtype."""
    server_flags: Flags = field(default_factory=dict)
    router_flags: Flags = field(default_factory=dict)
    logs: Path
    """Folder for the servers' output."""
    key: str = field(default_factory=secrets.token_urlsafe, repr=False)
    """The key of this run, which engines and router want with every request; random unless the user chose it."""
    origin: Origin | None = None
    """The checkpoint of the trainer's first weights; None for the weights in the model's folder."""
    pause_mode: PauseMode = "in_place"
    """The effect of a weight update on requests in flight."""
    disk: Path | None = None
    """Folder, not existing yet, through which weights reach the engines; None to broadcast them."""
    has_trainer: bool = True
    """False: the engines start alone, and keep the weights in the model's folder."""
    routes: RoutesShape | None = None
    """The shape of the routes of experts that the engines return; None if they return none."""

    @property
    def ranks_per_engine(self) -> int:
        """The tensor-parallel size of an engine; 1 on a CPU."""
        return self.cluster.rollout_num_gpus_per_engine if self.trainer.device == "cuda" else 1

    @property
    def needed_plugins(self) -> tuple[Plugin, ...]:
        """Our plug-ins inside SGLang that this run uses."""
        always: tuple[Plugin, ...] = ("stamps",) if self.routes is None else ("stamps", "routes")
        if self.cluster.colocate:
            return (*always, "memory_saver") if self.trainer.device == "cuda" else always
        return (*always, "direct") if self.has_trainer and self.disk is None else always

    @property
    def layout(self) -> Layout:
        """The processes to place, and their GPUs."""
        return Layout(
            device=self.trainer.device,
            num_ranks=self.cluster.num_trainer_ranks if self.has_trainer else 0,
            num_engines=self.cluster.num_engines,
            gpus_per_engine=self.cluster.rollout_num_gpus_per_engine,
            is_shared=self.cluster.colocate,
            tensor_parallel=self.trainer.parallel.tensor_model_parallel_size,
        )


def routes_shape(shape: ModelShape) -> RoutesShape | None:
    """Return the shape of the routes of a mixture of experts; None for a dense model, which has none."""
    experts = shape.experts
    if experts is None:
        return None
    return RoutesShape(
        num_layers=shape.num_layers,
        num_dense_layers=experts.num_dense_layers,
        num_experts=experts.num_experts,
        num_chosen=experts.num_chosen,
    )
