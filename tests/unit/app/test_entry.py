"""The run directory is closed to other users."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.app.entry import make_private


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
