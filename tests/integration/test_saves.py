"""Runs that meet at one ``--save``: the second is refused, and the first resumes at once after its own SIGKILL."""

import signal
import time
from pathlib import Path

import pytest

from asyncrl.engines.megatron.checkpoint.directory import latest
from tests.browser import problems_of
from tests.integration.launcher import QUICKSTART, START_S, Launched, run
from tests.unit.page.serving import opened, served

pytestmark = pytest.mark.timeout(1800)


def test_a_folder_has_one_run_that_resumes_at_once_after_a_kill(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    flags = (*QUICKSTART, "--save", str(saved), "--load", str(saved), "--save-interval", "1", "--keep-checkpoints", "2")
    first = Launched(tmp_path / "run", (*flags, "--num-rollout", "500", "--page-port", "0"))
    first.wait_for_steps(6, START_S)
    with first.killed_by_a_failure():
        assert problems_of(first.page(), "run") == []
        assert "running" in opened(first.page())

    second = run(tmp_path / "other", *flags)
    assert second.code == 1
    assert second.output.startswith(f"error: save {saved} is held by run ")
    assert second.output.count("\n") == 1
    assert not (tmp_path / "other").exists()

    first.send(signal.SIGKILL)
    killed = first.finish(60.0)
    assert (killed.code, killed.left) == (128 + signal.SIGKILL, ())
    with served(tmp_path / "run") as url:
        assert problems_of(url, "run") == []
        assert '<span class="state killed">' in opened(url)
    assert latest(saved) is not None
    assert len(list(saved.glob("iter_???????"))) <= 3  # the two newest, and one that may be about to be deleted

    began = time.monotonic()
    third = Launched(tmp_path / "run", (*flags, "--num-rollout", "600", "--lr", "1e-4", "--no-timeline"))
    third.wait_for_output("starting Ray", 60.0)
    assert time.monotonic() - began < 20.0
    third.send(signal.SIGTERM)
    outcome = third.end_in_time(143)
    assert f"resuming from {latest(saved)}" in outcome.output
    assert "changed since the checkpoint: num-rollout 500 → 600" in outcome.output
    assert "changed since the checkpoint: lr " in outcome.output
    assert list(saved.glob("*.partial")) == []
    assert {path.name for path in outcome.run_dir.glob("*.toml")} == {"quickstart.toml", "quickstart.1.toml"}
    assert "num-rollout = 500" in (outcome.run_dir / "quickstart.1.toml").read_text()
    assert "num-rollout = 600" in (outcome.run_dir / "quickstart.toml").read_text()
