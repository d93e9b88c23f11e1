"""The programs of this folder as processes of their own, forked from one that has imported Megatron and torch already.

Each import would take 5 to 50 s of a core that others want, too.
"""

import multiprocessing
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT: Any = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["asyncrl.engines.megatron.rank"])


class Program:
    """What ``subprocess.Popen`` makes, with pipes for text; ``with`` kills it."""

    def __init__(self, program: str | Path, *arguments: object, **environment: str) -> None:
        """``arguments`` and ``environment`` as the program would find them, were it started by its path."""
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in ("input", "output", "errors")]
        (its_input, ours), (output, its_output), (errors, its_errors) = pipes
        self.stdin = os.fdopen(os.dup(ours.fileno()), "w")
        self.stdout, self._errors = (os.fdopen(os.dup(each.fileno())) for each in (output, errors))
        words = [str(word) for word in (program, *arguments)]
        self._process = _CONTEXT.Process(target=_run, args=(words, environment, its_input, its_output, its_errors))
        self._process.start()
        for end in chain.from_iterable(pipes):
            end.close()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._process.join()
        for each in (self.stdin, self.stdout, self._errors):
            each.close()

    @property
    def returncode(self) -> int | None:
        """As Popen has it: a signal's number below zero."""
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        """By SIGKILL."""
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote to its output and to its errors until it ended.  Raises TimeoutError."""
        with ThreadPoolExecutor(2) as pool:
            reading = [pool.submit(stream.read) for stream in (self.stdout, self._errors)]
            self._process.join(timeout)
            if self._process.is_alive():
                self.kill()
                raise TimeoutError(f"{self._process.name} did not end within {timeout:g} s")
            return reading[0].result(), reading[1].result()


def _run(words: list[str], environment: dict[str, str], *pipes: Connection) -> None:
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    sys.argv = words
    os.environ.update(environment)
    runpy.run_path(words[0], run_name="__main__")
    sys.stdout.flush()
