"""Small worlds to simulate."""

from dataclasses import replace
from typing import Any

from asyncrl.sim.model.costs import Costs, EngineCosts, TrainerCosts, UpdateCosts
from asyncrl.sim.model.lengths import Drawn, LogNormal
from asyncrl.sim.model.workload import Workload
from asyncrl.sim.model.world import Schedule, Setting

LENGTHS = Drawn(shape=LogNormal(median=64, p95_ratio=8), cut=1024)

ENGINE = EngineCosts(
    fixed_s=0.01,
    per_request_s=0.001,
    per_context_token_s=0.0,
    prefill_tokens_per_s=100_000.0,
    kv_tokens=100_000,
    max_running=64,
)


def setting(staleness: int = 1, **changes: Any) -> Setting:
    """Two samples in each of 4 groups per step, on one engine and one trainer GPU.

    ``changes`` apply to the setting or to its schedule.
    """
    schedule = {name: changes.pop(name) for name in Schedule.__slots__ if name in changes}
    small = Setting(
        schedule=Schedule(staleness=staleness, **{"interval": 1, **schedule}),
        costs=Costs(
            engine=ENGINE,
            trainer=TrainerCosts(fixed_s=0.0, tokens_per_s_per_gpu=1000.0),
            update=UpdateCosts(pause_s=0.0),
        ),
        workload=Workload(lengths=LENGTHS, prompt_tokens=10, grain=1),
        gpus=2,
        rollout_gpus=1,
        gpus_per_engine=1,
        slots_per_engine=8,
        groups_per_step=4,
        group_size=2,
        steps=8,
        warm_up=2,
    )
    return replace(small, **changes)
