"""A real run, simulated with its own settings and the exact lengths of its answers."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from asyncrl.errors import DataError
from asyncrl.sim.calibration.calibrate import SKIPPED_STEPS
from asyncrl.sim.calibration.measured import MeasuredRun, read_run
from asyncrl.sim.model.costs import Costs
from asyncrl.sim.model.lengths import Drawn, Observed, Replayed
from asyncrl.sim.model.workload import Workload
from asyncrl.sim.model.world import Schedule, Setting, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Simulated and measured step times, over the steps that both have and no evaluation disturbed."""

    setting: Setting
    num_steps: int
    measured_s: float
    """Mean seconds per step."""
    simulated_s: float
    measured_median_s: float
    simulated_median_s: float

    @property
    def error(self) -> float:
        """Error of the mean, as a share of the measured mean; above 0 the model is too slow."""
        return self.simulated_s / self.measured_s - 1


def replay(run_dir: Path, costs: Costs, prompt_tokens: int) -> Comparison:
    """Simulate the run in ``run_dir`` and compare.  Raises DataError."""
    return replay_run(read_run(run_dir), costs, prompt_tokens)


def replay_run(run: MeasuredRun, costs: Costs, prompt_tokens: int) -> Comparison:
    """Simulate a run that has been read and compare.  Raises DataError."""
    setting = setting_of(run, costs, prompt_tokens)
    disturbed = _disturbed(run)
    steps = [step for step in range(SKIPPED_STEPS, setting.warm_up + setting.steps) if step not in disturbed]
    if not steps:
        raise DataError(
            "no step to compare: the run is too short, or held-out prompts were on the engines in each step"
        )
    simulated = simulate(setting).step_times_s
    measured = {row["step"]: row["time/step_s"] for row in run.rows}
    theirs = [measured[step] for step in steps]
    ours = [simulated[step - SKIPPED_STEPS] for step in steps]
    return Comparison(
        setting=setting,
        num_steps=len(steps),
        measured_s=fmean(theirs),
        simulated_s=fmean(ours),
        measured_median_s=median(theirs),
        simulated_median_s=median(ours),
    )


def setting_of(run: MeasuredRun, costs: Costs, prompt_tokens: int) -> Setting:
    """The setting in the run's configuration.  Raises DataError if the run was colocated."""
    config: dict[str, Any] = run.config
    if config.get("colocate"):
        raise DataError("the run was colocated: the simulator does not model trainer and engines on the same GPUs")
    known = run.lengths
    rest = Drawn(shape=Observed(sorted_tokens=tuple(sorted(known.values()))), cut=config["rollout-max-response-len"])
    interval = config["update-weights-interval"]
    staleness = config.get("max-staleness", interval)
    ranks, engine = config["actor-num-nodes"] * config["actor-num-gpus-per-node"], config["rollout-num-gpus-per-engine"]
    rollout_gpus, buffered = config.get("rollout-num-gpus", 1), config.get("async-buffer-size")  # a run's defaults
    return Setting(
        schedule=Schedule(
            staleness=staleness,
            interval=interval,
            stale=config.get("stale-policy", "wait"),
            update_mode=config.get("weight-update-mode", "in_place"),
        ),
        costs=replace(costs, engine=replace(costs.engine, max_running=config["sglang-server-concurrency"])),
        workload=Workload(lengths=Replayed(known=known, rest=rest), prompt_tokens=prompt_tokens, grain=1),
        gpus=ranks + rollout_gpus,
        rollout_gpus=rollout_gpus,
        gpus_per_engine=engine,
        slots_per_engine=config["sglang-server-concurrency"],
        groups_per_step=config["rollout-batch-size"],
        group_size=config["n-samples-per-prompt"],
        steps=len(run.rows) - SKIPPED_STEPS - staleness - 1,
        warm_up=SKIPPED_STEPS,
        over_sampling=config.get("over-sampling-batch-size"),
        buffer_size=None if buffered is None else buffered * config["rollout-batch-size"],
    )


def _disturbed(run: MeasuredRun) -> set[int]:
    """Steps in which held-out prompts were on the engines; a step lasts from the end of the previous one."""
    held_out = [(sample.start_s, sample.stop_s) for sample in run.samples if sample.group is None]
    ends = {step.step: step.stop_s for step in run.steps}
    return {
        step
        for step, stop in ends.items()
        if any(start < stop + 1 and end > ends.get(step - 1, 0.0) for start, end in held_out)
    }
