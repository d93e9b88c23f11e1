"""The data workers of a run: processes that read and tokenise blocks, each restarted once if it dies."""

import asyncio
import logging
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from asyncrl.data.streaming.wire import LENGTH, BlockPrompts, WorkerSettings, framed
from asyncrl.errors import DataError
from asyncrl.event_loop import Deadline

logger = logging.getLogger(__name__)

ANSWER_S = 300.0
"""Seconds for a worker to start and to answer one block, which may be on a slow network file system."""
END_S = 5.0
"""Seconds for a worker to end after it was killed, or after it closed its output."""
_PIPE_BYTES = 2**20
_PACKAGES = Path(__file__).parents[3]
"""Folder that holds the package, for workers that start in another working directory."""


class _Died(Exception):
    """The worker ended or did not answer in time."""


class DataWorkers:
    """Processes that answer requests for blocks.  Any free worker takes the next request."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self.started = asyncio.Event()
        """Set once the first worker has loaded the tokenizer."""
        self._requests: asyncio.Queue[tuple[int, int, asyncio.Future[BlockPrompts]]] = asyncio.Queue()

    def request(self, file: int, block: int) -> asyncio.Future[BlockPrompts]:
        """Request a block; its answer arrives in the future.  Failures end ``serve`` instead."""
        answer: asyncio.Future[BlockPrompts] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((file, block, answer))
        return answer

    async def serve(self, name: str) -> None:
        """Run one worker until cancelled.  Raises DataError if it dies twice, or a file cannot be read."""
        lives_left = 2
        waiting: tuple[int, int, asyncio.Future[BlockPrompts]] | None = None
        while True:
            async with _process() as process:
                try:
                    await _asked(process, self._settings)
                    self.started.set()
                    while True:
                        waiting = waiting or await self._requests.get()
                        file, block, answer = waiting
                        found = await _asked(process, (file, block))
                        if isinstance(found, str):
                            raise DataError(found)
                        if not answer.done():
                            answer.set_result(found)
                        waiting = None
                except _Died as error:
                    lives_left -= 1
                    if not lives_left:
                        path = self._settings.files[waiting[0]].path if waiting else ""
                        raise DataError(
                            f"{name} {error} twice, the last time at {path}{await _last_line(process)}"
                        ) from None


@asynccontextmanager
async def _process() -> AsyncIterator[Process]:
    """Start a worker; kill it on the way out, because it has nothing to save."""
    paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "asyncrl.data.streaming.worker")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**os.environ, **variables}, limit=_PIPE_BYTES
    )
    try:
        yield process
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    """Kill a worker and wait for its end, which asyncio notices only once its output is read.

    A worker that waits for a network file system cannot be killed, and a process that it started can keep its output
    open.  Neither keeps the run from ending, nor hides the run's error.
    """
    _kill(process)
    with suppress(TimeoutError):
        async with Deadline(END_S):
            for stream in filter(None, (process.stdout, process.stderr)):
                await stream.read()
            await process.wait()
    if process.returncode is None:
        logger.warning("data worker, process %d, did not end within %g s after SIGKILL: left", process.pid, END_S)
    if process.stdin is not None:
        process.stdin.close()


def _kill(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


async def _asked(process: Process, message: object) -> BlockPrompts | str:
    """Send a message to a worker and return its answer.  Raises _Died."""
    if process.stdout is None:
        raise AssertionError("the worker has no output")
    try:
        async with Deadline(ANSWER_S):
            await _send(process, framed(message))
            (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            found: BlockPrompts | str = pickle.loads(await process.stdout.readexactly(size))
            return found
    except TimeoutError:
        _kill(process)
        raise _Died(f"did not answer for {ANSWER_S:g} s") from None
    except asyncio.IncompleteReadError:
        raise _Died(await _ending(process)) from None


async def _ending(process: Process) -> str:
    """Return in words how a worker ended that closed its output."""
    with suppress(TimeoutError):
        async with Deadline(END_S):
            await process.wait()
    code = process.returncode
    if code is None:
        return f"closed its output and did not end within {END_S:g} s"
    return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"


async def _send(process: Process, message: bytes) -> None:
    if process.stdin is None:
        raise AssertionError("the worker has no input")
    with suppress(ConnectionError):  # it died, which its output tells
        process.stdin.write(message)
        await process.stdin.drain()


async def _last_line(process: Process) -> str:
    """Return the last line that a dead worker wrote about its end; empty if a process keeps its output open."""
    text = b""
    with suppress(TimeoutError):
        async with Deadline(END_S):
            text = b"" if process.stderr is None else await process.stderr.read()
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""
