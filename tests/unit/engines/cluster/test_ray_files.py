"""The files of Ray: the token and the folder of a session are closed to other users."""

import os
from pathlib import Path

import pytest

from asyncrl.engines.cluster.ray_files import protect_token, session_folder
from asyncrl.errors import ServerFailed


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_folder_of_a_session_is_in_one_that_only_its_owner_enters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = session_folder()
    assert folder.parent.parent == tmp_path
    assert mode(folder.parent) == 0o700
    folder.parent.chmod(0o755)  # of another program
    assert session_folder() == folder
    assert mode(folder.parent) == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"asyncrl-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(ServerFailed, match="belongs to another user; remove it, or set RAY_TMPDIR"):
        session_folder()


def test_a_place_that_the_user_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert session_folder() == tmp_path / "ray"
    assert list(tmp_path.iterdir()) == []


def test_the_token_is_random_and_readable_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    tokens = []
    for name in ("one", "other"):
        path = tmp_path / name / "token"
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        protect_token()
        assert mode(path) == 0o600
        tokens.append(path.read_text())
        path.chmod(0o644)  # as Ray makes it
        protect_token()
        assert mode(path) == 0o600
        assert path.read_text() == tokens[-1]
    assert len({*tokens}) == 2
    assert min(map(len, tokens)) == 64


def test_two_runs_that_make_a_token_at_once_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))

    def made(num_bytes: int) -> str:
        path.write_text("of the faster run")
        return "of this run"

    monkeypatch.setattr("asyncrl.engines.cluster.ray_files.secrets.token_hex", made)
    protect_token()
    assert path.read_text() == "of the faster run"
    assert list(tmp_path.iterdir()) == [path]


def test_a_switched_off_token_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    protect_token()
    assert "whoever reaches Ray's ports can run programs as this user" in caplog.text
    assert list(tmp_path.iterdir()) == []
