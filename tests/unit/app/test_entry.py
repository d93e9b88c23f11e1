"""The run directory is closed to other users; the exit code of a run that a signal reaches while it ends."""

import asyncio
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from asyncrl.app import entry
from asyncrl.app.ending.leaving import EndTimer
from asyncrl.app.entry import make_private
from asyncrl.app.signals import Signals
from asyncrl.config import load_run
from asyncrl.metrics.reporter import Reporter

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_a_new_run_directory_is_its_owners_alone(tmp_path: Path) -> None:
    assert make_private(tmp_path / "runs" / "mine") is None
    assert mode(tmp_path / "runs" / "mine") == 0o700


def test_a_run_directory_of_an_earlier_version_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(0o755)
    assert make_private(folder) is None
    assert mode(folder) == 0o700


def test_a_folder_for_all_users_stays_open_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    warning = make_private(folder)
    assert warning is not None
    assert "open to all users" in warning
    assert mode(folder) == 0o1777


ROW = {"step": 0, "time/step_s": 1.0, "time/trainer_waited_s": 0.0, "time/engines_idle_s": 0.0}


def signalled_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int, is_saved: bool) -> int:
    """Return the exit code of a run of two steps, of which ``steps`` are done when it gets SIGTERM.

    ``is_saved``: the signal reaches the clean-up, and otherwise the last save.
    """

    @contextmanager
    def session(*args: Any, **named: Any) -> Iterator[None]:
        yield

    async def in_session(*args: Any) -> None:
        (reporter,) = (each for each in args if isinstance(each, Reporter))
        (signals,) = (each for each in args if isinstance(each, Signals))
        (ending,) = (each for each in args if isinstance(each, EndTimer))
        with signals.cancelling():
            with ending:
                for _ in range(steps):
                    reporter.write(ROW)
                if not is_saved:
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(5)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)

    monkeypatch.setattr(entry, "ray_session", session)
    monkeypatch.setattr(entry, "_run_in_session", in_session)
    flags = ["--num-rollout", "2", "--rollout-log-share", "0", "--no-use-tensorboard", "--progress", "lines"]
    run = load_run(["--config", str(QUICKSTART), *flags])
    start = SimpleNamespace(step=0, before=None, origin=None, changes=())
    user_code = SimpleNamespace(close=lambda: None)
    checked: Any = SimpleNamespace(run=run, start=start, num_processes=1, user_code=user_code)
    with Signals.caught() as signals:
        with suppress(asyncio.CancelledError):
            entry._run(checked, tmp_path, Console(quiet=True), signals, None, None)  # noqa: SLF001
        return signals.exit_code


@pytest.mark.parametrize(("steps", "is_saved", "code"), [(2, True, 0), (2, False, 143), (1, True, 143)])
def test_a_signal_counts_until_all_steps_are_trained_and_saved(
    steps: int, is_saved: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signalled_run(tmp_path, monkeypatch, steps=steps, is_saved=is_saved) == code
