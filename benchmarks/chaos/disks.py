"""Small disks that can be filled: a tmpfs for each."""

import subprocess
from pathlib import Path

FILLER = "filler"
BLOCK = bytes(65_536)


def mount(folder: Path, megabytes: int) -> str | None:
    """Mount a tmpfs at ``folder``; return the reason if that is not possible, else None."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "asyncrl-chaos", str(folder))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        return f"mount: {error.strerror}"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def unmount(folder: Path) -> None:
    """Unmount ``folder`` if it is mounted."""
    if folder.is_mount():
        subprocess.run(("umount", "--lazy", str(folder)), capture_output=True, timeout=10, check=True)


def fill(folder: Path) -> None:
    """Write a file until the disk is full."""
    with (folder / FILLER).open("ab", buffering=0) as file:
        try:
            while file.write(BLOCK):
                pass
            while file.write(b"x"):
                pass
        except OSError:
            return


def free(folder: Path) -> None:
    """Remove the file of ``fill``."""
    (folder / FILLER).unlink(missing_ok=True)
