"""Disks without space, for tests that may not mount one."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Refuse to write any file of this process beyond ``num_bytes``.

    As on a disk that fills up, the kernel writes a part of the last record first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def on_full_disk(path: Path) -> Path:
    """Make ``path`` a file on a device without any space, and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")
    return path
