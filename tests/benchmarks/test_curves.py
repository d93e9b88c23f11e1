"""Learning curves: a table with means over seeds, a picture, and numbers that can be read again."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.curves import __main__ as curves
from benchmarks.curves.picture import Arm, smoothed


def run_dir(folder: Path, rewards: list[float], accuracies: dict[int, float]) -> str:
    """A run directory of a run that evaluated after some numbers of steps."""
    folder.mkdir()
    lines = []
    for step, reward in enumerate(rewards):
        line: dict[str, float] = {"step": step, "reward/mean": reward, "lag/mean": 2.5, "lag/max": 8, "train/loss": 1}
        if step in accuracies:
            line |= {"eval/step": step, "eval/accuracy": accuracies[step]}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


def test_arms_are_compared_by_their_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = [run_dir(tmp_path / f"a{seed}", [0.1] * 20, {0: 0.0, 10: 0.2, 19: 0.4 + seed / 10}) for seed in (0, 2)]
    other = [run_dir(tmp_path / "b", [0.5] * 20, {0: 0.0, 10: 0.6, 19: 0.8})]
    numbers, drawn = tmp_path / "curves.csv", tmp_path / "curves.svg"

    assert curves.main(["--arm", "plain", *plain, "--arm", "other", *other, "--csv", str(numbers)]) == 0

    said = capsys.readouterr().out
    assert "| plain | a2 | 0.000 | 0.600 | 0.400 | 0.100 | 2.5 | 8 |" in said
    assert "| plain | all 2 | | 0.500 ± 0.141 | 0.350 ± 0.071 | 0.100 ± 0.000 | | |" in said
    assert "| other | all 1 | | 0.800 | 0.700 | 0.500 | | |" in said
    assert curves.main(["--from-csv", str(numbers), "--svg", str(drawn)]) == 0
    assert capsys.readouterr().out == said
    lines = ET.fromstring(drawn.read_text()).findall(".//{*}polyline")
    assert len(lines) == 2 * (3 + 2)  # two panels of three runs and two means


@pytest.mark.parametrize(
    ("arguments", "line"),
    [([], "no run is named"), (["--arm", "plain", "nowhere"], "nowhere/metrics.jsonl: No such file")],
)
def test_without_runs_there_is_nothing_to_show(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        curves.main(arguments)
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


def test_means_are_over_steps_that_all_runs_have() -> None:
    assert Arm(name="", curves=[[(0, 0.0), (1, 1.0)], [(1, 0.5)]]).mean == [(1, 0.75)]
    assert smoothed([(step, float(step)) for step in range(7)])[-1] == (6, 4.0)
