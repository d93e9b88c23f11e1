"""Simulation speed with a thousand full engines, compared with real time.

The engines have the costs of ``sim/model/costs.py`` and KV cache for 100 answers.  Lengths and prompts are the default
comparison's; engines and trainer are balanced.  A step trains as many samples as are in flight.  Answers take up to 11
minutes and nine steps take longer, so that a staleness of 8 never holds back admission and every slot is taken from
the start.
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from asyncrl.metrics.facts import StepFacts
from asyncrl.sim.model.costs import Costs, EngineCosts, balanced_trainer
from asyncrl.sim.model.lengths import Drawn, LogNormal
from asyncrl.sim.model.workload import Workload
from asyncrl.sim.model.world import Enough, Schedule, Setting, simulate

ENGINES = 1000
SLOTS = 100
"""Slots per engine."""
STEPS = 4
"""Steps of a minute and a half each: together longer than the longest answer takes."""
_GROUP = 8
_STALENESS = 8
_PROMPT_TOKENS = 256
_LENGTHS = Drawn(shape=LogNormal(median=1024, p95_ratio=8), cut=16 * 1024)
_KV_TOKENS = 1_000_000
"""KV cache for 100 answers of 3,400 tokens, the mean context of running ones, so that nothing is retracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The measured cost of a large simulation."""

    num_engines: int
    num_slots: int
    num_steps: int
    in_flight: tuple[int, ...]
    """Samples in flight at the end of each step."""
    decoding: float
    """Requests decoded at once by all engines, mean over the whole time; pauses for updates count as none."""
    samples: int
    """Samples trained."""
    simulated_s: float
    wall_s: float
    cpu_s: float

    @property
    def ratio(self) -> float:
        """Simulated seconds per second of wall time."""
        return self.simulated_s / self.wall_s

    @property
    def cpu_ratio(self) -> float:
        """Simulated seconds per second of CPU time: the ratio on a machine that does nothing else."""
        return self.simulated_s / self.cpu_s


def full_fleet(num_engines: int, steps: int) -> Setting:
    """A setting with ``num_engines`` engines that stay full for ``steps`` steps, and a trainer that keeps up."""
    engine = EngineCosts(max_running=SLOTS, kv_tokens=_KV_TOKENS)
    moments = _LENGTHS.moments()
    rate = balanced_trainer(
        engine, moments, _PROMPT_TOKENS, rollout_gpus=num_engines, gpus_per_engine=1, gpus=2 * num_engines
    )
    costs = Costs(engine=engine)
    return Setting(
        schedule=Schedule(staleness=_STALENESS, interval=1),
        costs=replace(costs, trainer=replace(costs.trainer, tokens_per_s_per_gpu=rate)),
        workload=Workload(lengths=_LENGTHS, prompt_tokens=_PROMPT_TOKENS, grain=max(1, round(moments.mean / 100))),
        gpus=2 * num_engines,
        rollout_gpus=num_engines,
        gpus_per_engine=1,
        slots_per_engine=SLOTS,
        groups_per_step=num_engines * SLOTS // _GROUP,
        group_size=_GROUP,
        steps=steps,
        warm_up=0,
    )


def measure(setting: Setting) -> Scaled:
    """Simulate the setting from its start and measure the time that it takes in this process."""
    in_flight, seconds = list[int](), (0.0, 0.0, 0.0)
    start = _clocks()

    def report(facts: StepFacts) -> None:
        nonlocal seconds
        in_flight.append(facts.scheduler.samples_in_flight)
        if len(in_flight) == setting.steps:
            wall_s, cpu_s = (now - then for now, then in zip(_clocks(), start, strict=True))
            seconds = asyncio.get_running_loop().time(), wall_s, cpu_s
            raise Enough

    with _collector_off():
        result = simulate(setting, report=report)
    num_slots = setting.num_engines * setting.slots_per_engine
    return Scaled(
        num_engines=setting.num_engines,
        num_slots=num_slots,
        num_steps=setting.steps,
        in_flight=tuple(in_flight),
        decoding=result.slots_filled * num_slots,
        samples=setting.steps * setting.groups_per_step * setting.group_size,
        simulated_s=seconds[0],
        wall_s=seconds[1],
        cpu_s=seconds[2],
    )


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


@contextmanager
def _collector_off() -> Iterator[None]:
    """Switch the garbage collector off: samples leave no cycles, and after 60,000 it had nothing to collect."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
