"""A run that a Python program drives, and the steps that it yields.

    import asyncrl

    run = asyncrl.Run("configs/quickstart.toml", num_rollout=4)
    async for step in run.steps():  # in a notebook or a coroutine; a script writes ``for``
        print(step.number, step.metrics["reward/mean"])

The run itself is another process (``process``), so this module imports neither torch nor Ray.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from asyncrl.api.flags import flag_words
from asyncrl.api.process import Ended, RunProcess, wait_for_left_runs
from asyncrl.config import load_run
from asyncrl.daemon_threads import off_loop
from asyncrl.errors import SamplesMissing

LOOK_EVERY_S = 0.02
"""Seconds between two looks for the file of a step's samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step that a run has done."""

    number: int
    """The step, counted from 0."""
    metrics: Mapping[str, float]
    """Every number of the step by name, as in ``metrics.jsonl``; a number that is not finite is NaN."""
    run_dir: Path
    former_files: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """When the files of samples were written that were there before the run began, by name.

    A resumed run repeats steps and replaces their files, each a moment after its step.
    """

    @property
    def samples_file(self) -> Path:
        """The Parquet file of the step's samples.

        It appears shortly after the step, whole.  Until then, a resumed run may have a file of its former life there.
        """
        from asyncrl.rollout_log.files import file_of

        return file_of(self.run_dir, self.number)

    def samples(self, timeout_s: float = 30.0) -> Any:
        """Return the step's samples as a ``pyarrow.Table`` with one row per sample, once their file is there.

        Raises SamplesMissing if it is not there after ``timeout_s`` seconds.
        """
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        deadline = time.monotonic() + timeout_s
        while not self._has_samples():
            if time.monotonic() >= deadline:
                raise SamplesMissing(f"{self.samples_file}: not there after {timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)
        return pq.read_table(self.samples_file)

    def _has_samples(self) -> bool:
        """Return whether the file is there, and this run wrote it."""
        path = self.samples_file
        try:
            return path.stat().st_mtime_ns != self.former_files.get(path.name)
        except FileNotFoundError:
            return False


class Run:
    """The description of a run.  Each call of ``steps`` starts it."""

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, /, **flags: Any) -> None:
        """Take a TOML file, or a mapping with the names of flags as keys, and further flags as keywords.

        ``num_rollout=4`` stands for ``--num-rollout 4``, and replaces the value of ``config``.  Relative paths in a
        mapping and in flags are relative to the working directory.  Raises ConfigError for settings that are wrong in
        themselves; files and user functions are checked at the start.
        """
        settings = {_name(key): value for key, value in flags.items()}
        if isinstance(config, Mapping):
            settings = {_name(key): value for key, value in config.items()} | settings
        elif config is not None:
            settings = {"config": os.fspath(config)} | settings
        self.argv = flag_words(settings)
        """The command line of the same run, without the program."""
        parsed = load_run(self.argv)
        self._grace_s = parsed.failures.grace_s
        self._shows_progress = "progress" in settings or parsed.output.dry_run

    def steps(self) -> "Steps":
        """Return the steps of a new start of the run, which begins when the first one is asked for."""
        return Steps(partial(RunProcess, self.argv, grace_s=self._grace_s, shows_output=self._shows_progress))


def _name(key: str) -> str:
    return key.replace("_", "-")


class Steps:
    """The steps of one start of a run, for ``for`` and for ``async for``.  Use one of them, from one thread or task.

    A loop that is left early, by ``break``, an exception or a cancelled wait for a step, ends the run as SIGTERM does:
    with a checkpoint, if it has ``--save``.  The end takes seconds, while the program continues.  ``close``, ``aclose``
    and the end of a ``with`` block wait for it, as do the next run and the exit of the program.

    Iterating raises the error that ended the run: one of ``asyncrl.errors``, with the class and the text that the
    command would print.
    """

    def __init__(self, start: "partial[RunProcess]") -> None:
        self._start = start
        self._process: RunProcess | None = None
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        if not self._is_over:
            with self._left_if_interrupted():
                message = self._begun().get()
            if (step := self._step_of(message)) is not None:
                return step
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        if not self._is_over:
            with self._left_if_interrupted():
                if self._process is None:
                    await off_loop(wait_for_left_runs, "left-runs")
                message = await self._begun().aget()
            if (step := self._step_of(message)) is not None:
                return step
        raise StopAsyncIteration

    def close(self) -> None:
        """End the run, if it has not ended, and return once no process of it is left."""
        if (process := self._leave()) is not None:
            process.wait()

    async def aclose(self) -> None:
        """Do what ``close`` does, without blocking the event loop.  Cancelling this does not stop the end."""
        if (process := self._leave()) is not None:
            await off_loop(process.wait, "run-end")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:  # a loop that is left drops its iterator
        self._leave()

    @contextmanager
    def _left_if_interrupted(self) -> Iterator[None]:
        """End the run if the wait for a step is interrupted or cancelled.

        The traceback, which a notebook keeps, would keep these steps alive.
        """
        try:
            yield
        except BaseException:
            self._leave()
            raise

    def _begun(self) -> RunProcess:
        if self._process is None:
            wait_for_left_runs()
            self._process = self._start()
        return self._process

    def _leave(self) -> RunProcess | None:
        self._is_over = True
        if self._process is not None:
            self._process.end()
        return self._process

    def _step_of(self, message: Mapping[str, Any] | Ended) -> Step | None:
        """Return the step of a message, or None at the end of the run.  Raises the error that ended it."""
        if isinstance(message, Ended):
            self._is_over = True
            if message.error is not None:
                raise message.error
            return None
        row = message["row"]
        metrics = {name: math.nan if value is None else value for name, value in row.items()}
        return Step(
            number=row["step"],
            metrics=MappingProxyType(metrics),
            run_dir=Path(message["run_dir"]),
            former_files=message["former_files"],
        )
