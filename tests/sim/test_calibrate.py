"""Calibration recovers the constants of a run from its files."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from asyncrl.config import load_run
from asyncrl.config.resolved import resolved
from asyncrl.errors import DataError
from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.timeline import PART_BYTES, TimelineFile, part_of
from asyncrl.sim.calibration.calibrate import Calibration, calibrate
from asyncrl.sim.calibration.measured import read_run
from asyncrl.sim.calibration.replay import replay
from asyncrl.sim.model.costs import Costs, EngineCosts, Sharing, TrainerCosts, UpdateCosts
from asyncrl.sim.model.lengths import Drawn, LogNormal
from asyncrl.sim.model.world import Setting, simulate
from asyncrl.sim.search.options import costs_of
from tests.sim.settings import setting

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
PROMPT = 10
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


def test_a_timeline_in_parts_reads_as_one(tmp_path: Path) -> None:
    run_in(tmp_path / "whole", staleness=2, interval=1, slots=16)
    run_in(tmp_path / "parts", staleness=2, interval=1, slots=16, part_bytes=70_000)
    assert len(list((tmp_path / "parts").glob("timeline*.json"))) > 1
    assert read_run(tmp_path / "parts").samples == read_run(tmp_path / "whole").samples


def test_a_timeline_without_a_part_is_refused(tmp_path: Path) -> None:
    for number in (1, 3):
        part_of(tmp_path / "timeline.json", number).write_text("[]")
    with pytest.raises(DataError, match="1 of its 3 parts were removed"):
        read_run(tmp_path)


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


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    folder = tmp_path_factory.mktemp("calibration") / "run"
    run_in(folder, staleness=2, interval=2, slots=32, groups=16)
    return calibrate(folder, PROMPT)


def test_calibration_recovers_the_constants(fitted: Calibration) -> None:
    assert fitted.pause_s == pytest.approx(0.03, abs=0.001)
    assert fitted.engine_slowdown == pytest.approx(1.3, abs=0.1)
    assert fitted.trainer_slowdown == pytest.approx(1.2, abs=0.1)
    assert fitted.fixed_s == pytest.approx(0.004, rel=0.15)
    assert fitted.per_request_s == pytest.approx(0.0003, rel=0.15)
    assert fitted.train_fixed_s == pytest.approx(0.3, rel=0.1)
    assert max(fitted.sample_error, fitted.step_error) < 0.03


@pytest.mark.parametrize(("staleness", "interval", "slots"), [(0, 1, 64), (1, 1, 16)])
def test_runs_with_other_settings_are_predicted(
    fitted: Calibration, tmp_path: Path, staleness: int, interval: int, slots: int
) -> None:
    run_in(tmp_path / "other", staleness, interval, slots)
    seen = replay(tmp_path / "other", costs_of(fitted.tables()), PROMPT)
    assert seen.num_steps > 8
    assert seen.error == pytest.approx(0.0, abs=0.05)


def test_with_the_true_constants_a_replay_is_exact(tmp_path: Path) -> None:
    run_in(tmp_path / "run", staleness=2, interval=1, slots=16)
    assert replay(tmp_path / "run", TRUE, PROMPT).error == pytest.approx(0.0, abs=0.001)


def test_runs_on_shared_gpus_are_not_replayed(tmp_path: Path) -> None:
    run_in(tmp_path / "run", staleness=0, interval=1, slots=16)
    config = tmp_path / "run" / "run.toml"
    config.write_text(config.read_text().replace("colocate = false", "colocate = true"))
    with pytest.raises(DataError, match="the run was colocated"):
        replay(tmp_path / "run", TRUE, PROMPT)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"timeline.json: No such file"):
        read_run(tmp_path)
