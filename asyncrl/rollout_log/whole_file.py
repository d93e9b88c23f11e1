"""Files that appear whole or not at all."""

from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` write another path, and rename it to ``path``.  Raises OSError, and what ``write`` raises.

    Folders are made as needed.  After a failure neither path is there, unless ``path`` was there before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
