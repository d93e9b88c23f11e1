"""The page of a run as a program, as a user starts it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def page_of(folder: Path) -> Iterator[str]:
    """The address of the page of a run, in a separate process."""
    command = [sys.executable, "-m", "asyncrl.page", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield program.stdout.readline().strip()
        finally:
            program.terminate()
