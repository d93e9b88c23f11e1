"""The example in docs/doctor.md is what the doctor prints."""

import re
from pathlib import Path

import pytest

from asyncrl.doctor.__main__ import main

PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
HOME = "/home/me"


def test_the_pages_example_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, script, reward, toml, report = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_run.sh").write_text(script)
    (tmp_path / "my_rewards.py").write_text(reward)
    assert main([str(tmp_path / "my_run.sh"), "--env", "MODELS=/models"]) == 1
    out, err = (text.replace(str(tmp_path), HOME) for text in capsys.readouterr())
    assert out == toml
    assert err == report
