"""Simulated runs that leave the files of real ones."""

from dataclasses import replace
from pathlib import Path

import orjson

from asyncrl.config import load_run
from asyncrl.config.resolved import resolved
from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.timeline import PART_BYTES, TimelineFile
from asyncrl.sim.model.costs import Costs, EngineCosts, Sharing, TrainerCosts, UpdateCosts
from asyncrl.sim.model.lengths import Drawn, LogNormal
from asyncrl.sim.model.world import Setting, simulate
from tests.sim.settings import setting

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
TRUE = Costs(
    engine=EngineCosts(
        latency_s=0.03,
        fixed_s=0.004,
        per_request_s=0.0003,
        per_context_token_s=0.0,
        prefill_tokens_per_s=2000.0,
        kv_tokens=10**6,
        max_running=64,
    ),
    trainer=TrainerCosts(fixed_s=0.3, tokens_per_s_per_gpu=20_000.0),
    update=UpdateCosts(pause_s=0.03),
    sharing=Sharing(engine=1.3, trainer=1.2),
    step_overhead_s=0.02,
)


def run_in(
    folder: Path, staleness: int, interval: int, slots: int, groups: int = 8, part_bytes: int = PART_BYTES
) -> Setting:
    """A simulated run that leaves the files of a real one."""
    lengths = Drawn(shape=LogNormal(median=20, p95_ratio=2.5), cut=64)
    base = setting(staleness, interval=interval, groups_per_step=groups, group_size=8, slots_per_engine=slots, steps=12)
    base = replace(base, costs=TRUE, workload=replace(base.workload, lengths=lengths))
    folder.mkdir()
    timeline, rows = TimelineFile(folder, 0.0, part_bytes=part_bytes), list[bytes]()

    def report(facts: StepFacts) -> None:
        times = {"step": facts.batch.step, "time/step_s": facts.step_s, "time/train_s": facts.train_s}
        times |= {"time/trainer_waited_s": facts.trainer_waited_s}
        times |= {"time/update_s": facts.update.total_s} if facts.update else {}
        rows.append(orjson.dumps(times))

    simulate(base, timeline, report)
    timeline.close()
    (folder / "metrics.jsonl").write_bytes(b"\n".join(rows))
    (folder / "run.toml").write_text(_config(base))
    return base


def _config(run: Setting) -> str:
    """The configuration as a real run writes it: without the settings that were left at their defaults."""
    flags = {
        "rollout-batch-size": run.groups_per_step,
        "n-samples-per-prompt": run.group_size,
        "update-weights-interval": run.schedule.interval,
        "max-staleness": run.schedule.staleness,
        "sglang-server-concurrency": run.slots_per_engine,
        "rollout-max-response-len": 64,
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return resolved(load_run(["--config", str(QUICKSTART), *arguments]))
