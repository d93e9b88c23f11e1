"""Calibration recovers the constants of a run from its files."""

from pathlib import Path

import pytest

from asyncrl.errors import DataError
from asyncrl.metrics.timeline import part_of
from asyncrl.sim.calibration.calibrate import Calibration, calibrate
from asyncrl.sim.calibration.measured import read_run
from asyncrl.sim.calibration.replay import replay
from asyncrl.sim.search.options import costs_of
from tests.sim.made_run import TRUE, run_in

PROMPT = 10


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
