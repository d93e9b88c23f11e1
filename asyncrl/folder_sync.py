"""Flushes of folders to the disk, which some file systems do not know."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

_UNKNOWN = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
"""Errors of file systems that flush no folder, among them some over SMB and FUSE."""


@contextmanager
def where_known() -> Iterator[None]:
    """Flush a folder within this context.  Raises OSError, unless the file system flushes no folder at all.

    Such a file system writes the names of a folder by itself.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
