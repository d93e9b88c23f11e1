"""The files that ``benchmarks.sync_vs_async`` leaves behind are enough to predict its own ratios."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from asyncrl.metrics.facts import StepFacts, TokenCounts
from asyncrl.metrics.timeline import TimelineFile, Track
from asyncrl.sim.model.costs import Costs, EngineCosts, TrainerCosts, UpdateCosts
from asyncrl.sim.model.world import Enough, simulate
from benchmarks.predict.costs import calibrate_on
from benchmarks.predict.predicted import predicted, ratio, results_of, setting_of
from benchmarks.simulate import __main__ as command
from benchmarks.sync_vs_async.arrangements import Seen, arrangement
from benchmarks.sync_vs_async.figures import ArrangementRun, Setup

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200S = RESULTS / "sync_vs_async_h200_2026-11-21"
LATER = "sync_vs_async_2_4xh200_2026-11-22"
SETUP = Setup(
    model="tiny",
    device="cuda",
    trainer_gpus=1,
    engine_gpus=2,
    slots=64,
    groups=16,
    group_size=4,
    median=256,
    longest=4096,
    prompt_tokens=64,
    max_tokens_per_gpu=8192,
    parallel={},
)
DENSE = Costs(
    engine=EngineCosts(
        fixed_s=0.0025,
        per_request_s=0.00001,
        per_context_token_s=30e-9,
        per_longest_token_s=200e-9,
        prefill_fixed_s=0.03,
        prefill_tokens_per_s=60_000.0,
        kv_tokens=10**9,
        max_running=64,
    ),
    trainer=TrainerCosts(fixed_s=0.0, tokens_per_s_per_gpu=20_000.0),
    update=UpdateCosts(pause_s=0.05, take_s=0.4),
)
SPARSE = replace(
    DENSE,
    engine=replace(DENSE.engine, by_running=((1, 0.002), (2, 0.0025), (4, 0.003), (8, 0.0032), (64, 0.0034))),
    update=UpdateCosts(pause_s=1.2, holds_trainer=True),
)
"""Costs of a mixture of four experts, two for each token: most are in use from a few requests on."""


@dataclass(slots=True)
class Later:
    """``Timeline`` of one run of several, shifted by the seconds and versions of the runs before it."""

    file: TimelineFile
    seconds: float
    versions: int

    def span(self, track: Track, name: str, start_s: float, stop_s: float, **args: Any) -> None:
        words, _, number = name.rpartition(" ")
        name = f"{words} {int(number) + self.versions}" if words == "update to version" else name
        self.file.span(track, name, start_s + self.seconds, stop_s + self.seconds, **args)

    def sample(self, slot: int, name: str, start_s: float, stop_s: float, **args: Any) -> None:
        args["version"] += self.versions
        self.file.sample(slot, name, start_s + self.seconds, stop_s + self.seconds, **args)

    def counter(self, name: str, at_s: float, value: float) -> None:
        """Discard the value: the prediction reads no counter."""

    def close(self) -> None:
        """Leave the file open for the next run."""


def leave_results(folder: Path, setup: Setup, costs: Costs, steps: Mapping[str, int]) -> Path:
    """Write the files that the benchmark would leave behind on a machine with these costs."""
    folder.mkdir(exist_ok=True)
    file, runs, at_s, version = TimelineFile(folder, 0.0), list[ArrangementRun](), 0.0, 1
    for name, measured in steps.items():
        run, seconds = _simulated(Later(file, at_s, version), setup, costs, name, measured)
        runs.append(run)
        at_s, version = at_s + seconds + 1.0, version + len(run.rows) + 1
    file.close()
    about = {"hardware": "none", "date": "", "command": "", "commit": ""}
    found = {"about": about, "setup": asdict(setup), "runs": [asdict(run) for run in runs], "full_rates": []}
    (folder / "results.json").write_bytes(orjson.dumps(found))
    return folder / "results.json"


def _simulated(timeline: Later, setup: Setup, costs: Costs, name: str, measured: int) -> tuple[ArrangementRun, float]:
    kind = arrangement(name)
    seen = Seen(round_steps=kind.round_steps, start_s=0.0)

    def report(facts: StepFacts) -> None:
        seen.add(facts, asyncio.get_running_loop().time(), 0)
        if len(seen.steps) == measured:
            raise Enough

    run = ArrangementRun(
        arrangement=name,
        staleness=kind.staleness,
        seed=1,
        is_complete=True,
        steps=(),
        before=TokenCounts(),
        after=TokenCounts(),
        seconds=0.0,
        trainer_busy_s=0.0,
        engines_busy_s=0.0,
        request_s=0.0,
        aborted=0,
        rows=({},) * (1 + kind.staleness),
    )
    simulate(replace(setting_of(setup, run, costs), steps=measured), timeline, report)
    rows = tuple({**found, "version": found["version"] + timeline.versions} for found in seen.rows)
    seconds = seen.stop_s - seen.start_s
    run = replace(run, steps=tuple(seen.steps), rows=rows, before=seen.before, after=seen.after, seconds=seconds)
    return run, seen.stop_s


@pytest.mark.parametrize(("model", "costs"), [("tiny", DENSE), ("tiny-moe", SPARSE)])
def test_a_modelled_machine_is_predicted_from_one_arrangement(tmp_path: Path, model: str, costs: Costs) -> None:
    setup = replace(SETUP, model=model)
    file = leave_results(tmp_path, setup, costs, {"sync": 3, "one-step": 3, "S=2": 8, "S=4": 4})
    found = calibrate_on(file, *results_of(file))
    assert found.costs.update.pause_s == pytest.approx(costs.update.pause_s, abs=0.002)
    assert found.costs.update.take_s == pytest.approx(costs.update.take_s, abs=0.002)
    assert found.costs.update.holds_trainer is costs.update.holds_trainer
    assert found.costs.engine.prefill_fixed_s == pytest.approx(0.03, rel=0.1)
    assert found.costs.trainer.tokens_per_s_per_gpu == pytest.approx(20_000, rel=0.02)
    for running, context, longest in ((2, 4_000, 3_000), (16, 20_000, 4_000), (50, 30_000, 1_000)):
        right = costs.engine.step_s(running, context, longest)
        assert found.costs.engine.step_s(running, context, longest) == pytest.approx(right, rel=0.035)
    seen = {each.arrangement: each for each in predicted(*results_of(file), found.costs)}
    assert list(seen) == ["sync", "one-step", "S=2", "S=4"]
    for each in seen.values():
        assert ratio(each, seen["sync"]).error == pytest.approx(0.0, abs=0.05), each


@pytest.mark.parametrize(
    "name",
    [
        *(f"{H200S.name}/{name}" for name in ("dense_2", "moe_4")),
        "sync_vs_async_4xh200_2026-11-22/dense_4",
        *(f"{LATER}/{name}" for name in ("dense_2", "moe_2")),
    ],
)
def test_ratios_measured_on_gpus_are_predicted_from_one_arrangement(tmp_path: Path, name: str) -> None:
    file, out = RESULTS / name / "results.json.xz", tmp_path / "costs.toml"
    assert command.main(["--predict", str(file), "--check", "--out", str(out)]) == 0


@pytest.mark.parametrize(("name", "run"), [("moe_2", "sync"), ("moe_4", "S=2")])
def test_a_run_that_the_model_does_not_describe_is_not_calibrated_on(name: str, run: str) -> None:
    file = RESULTS / LATER / name / "results.json.xz"
    assert f"Fitted to {run} of" in calibrate_on(file, *results_of(file)).about


def test_machines_predict_each_other(tmp_path: Path) -> None:
    two, four = (H200S / name / "results.json.xz" for name in ("dense_2", "dense_4"))
    assert command.main(["--predict", str(two), "--out", str(tmp_path / "costs.toml")]) == 0
    assert command.main(["--predict", str(four), "--check", "--calibration", str(tmp_path / "costs.toml")]) == 0


def test_a_ratio_that_is_off_fails_the_check(tmp_path: Path) -> None:
    file = leave_results(tmp_path, SETUP, DENSE, {"sync": 3, "S=2": 6})
    found = orjson.loads(file.read_bytes())
    found["runs"][0]["seconds"] *= 1.3
    file.write_bytes(orjson.dumps(found))
    out = ["--out", str(tmp_path / "costs.toml")]
    assert command.main(["--predict", str(file), *out]) == 0
    assert command.main(["--predict", str(file), "--check", *out]) == 1


def test_missing_arrangements_and_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = leave_results(tmp_path, SETUP, DENSE, {"S=2": 6})
    out = ["--out", str(tmp_path / "costs.toml")]
    assert command.main(["--predict", str(file), "--check", *out]) == 2
    assert "sync one of them" in capsys.readouterr().out.replace("\n", " ")
    (tmp_path / "timeline.json").unlink()
    assert command.main(["--predict", str(file), *out]) == 2
    assert "timeline.json" in capsys.readouterr().out
