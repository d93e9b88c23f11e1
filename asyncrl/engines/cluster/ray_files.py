"""The files of Ray that only this user reads: the token without which Ray runs nothing, and the files of a session."""

import logging
import os
import secrets
from pathlib import Path
from uuid import uuid4

from asyncrl.errors import ServerFailed

logger = logging.getLogger(__name__)

PRIVATE = 0o600
_OTHERS = 0o077


def protect_token() -> None:
    """Make Ray's token file, or close an existing one to other users; Ray makes one that every user can read.

    Nothing happens if the variable RAY_AUTH_TOKEN has the token.  Warns if RAY_AUTH_MODE switches the token off.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        logger.warning("RAY_AUTH_MODE=%s: whoever reaches Ray's ports can run programs as this user", mode)
    elif not os.environ.get("RAY_AUTH_TOKEN"):
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        try:
            _protect(path)
        except OSError as error:  # Ray says what it needs
            logger.warning("%s with Ray's token is not protected from other users: %s", path, error.strerror)


def session_folder() -> Path:
    """Return a folder for Ray's logs and sockets, in one that only this user enters.

    Ray makes its own folders writable for every user, who could put another program's socket in the place of Ray's.
    RAY_TMPDIR overrides the place, which is then as open as Ray makes it.

    Raises ServerFailed.
    """
    if "RAY_TMPDIR" in os.environ:
        return Path(os.environ["RAY_TMPDIR"]) / "ray"
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"asyncrl-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
        if found.st_uid != os.getuid() or folder.is_symlink():
            raise ServerFailed(f"{folder} for Ray's files belongs to another user; remove it, or set RAY_TMPDIR")
        if found.st_mode & _OTHERS:
            folder.chmod(0o700)
    except OSError as error:
        raise ServerFailed(f"no folder {folder} for Ray's files (RAY_TMPDIR): {error.strerror}") from error
    return folder / "ray"


def _protect(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.stat().st_size:
        if path.stat().st_mode & _OTHERS:
            path.chmod(PRIVATE)
        return
    # Complete under another name: an empty token, of a full disk for example, would keep every later run from starting.
    made = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w") as file:
            file.write(secrets.token_hex(32))
        if not path.exists():
            path.hardlink_to(made)
        elif not path.stat().st_size:
            made.replace(path)
    except FileExistsError:  # another run was faster
        return
    finally:
        made.unlink(missing_ok=True)
