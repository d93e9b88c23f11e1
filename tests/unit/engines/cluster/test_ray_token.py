"""Ray's token file is complete, and only its owner reads it."""

import errno
import secrets
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.cluster.ray_files import protect_token


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray" / "auth_token"))
    return tmp_path / "ray" / "auth_token"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_token_is_made_where_there_is_none_or_an_empty_one(token: Path, is_there: bool) -> None:
    if is_there:
        token.parent.mkdir()
        token.touch()
    protect_token()
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600
    assert list(token.parent.iterdir()) == [token]


def test_a_token_that_is_there_is_closed_to_others_and_kept(token: Path) -> None:
    token.parent.mkdir()
    token.write_text("mine")
    token.chmod(0o644)
    protect_token()
    assert (token.read_text(), token.stat().st_mode & 0o777) == ("mine", 0o600)


def test_a_full_disk_leaves_no_empty_token(
    token: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(secrets, "token_hex", full)
    protect_token()
    assert list(token.parent.iterdir()) == []
    assert "is not protected from other users: No space left on device" in caplog.text
