"""Environments of the package ``verifiers`` (Prime Intellect), trained from their packages.

    custom-generate-function-path = "asyncrl.rollouts.environments.verifiers:environment(env_id='my-env', max_turns=4)"
    data-source-path = "asyncrl.rollouts.environments.verifiers:prompts(env_id='my-env', max_turns=4)"

The environment runs in a process with ``verifiers``, and asks the model through the gateway like any OpenAI client.
Its rubric gives the reward.  ``python -m asyncrl.rollouts.environments.verifiers ENV_ID`` prints the rows of its
held-out data set for ``--eval-prompt-data``, with the keys ``prompt``, ``label`` and ``metadata``.
"""

import argparse
import asyncio
import atexit
import functools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from asyncrl.daemon_threads import off_loop
from asyncrl.errors import EpisodeFailed, PluginError
from asyncrl.rollouts.native import Episode
from asyncrl.types import NewPrompt

WORKER = Path(__file__).with_name("verifiers_worker.py")
ROW = "verifiers"
"""Key of a prompt's metadata with the row of the environment's data set."""
_MOST_BYTES = 1 << 26
"""Bytes of a row or a result, at most."""
_OF_MODEL = (
    *("max-turns is", "max_turns", "maximum context length", "model's context length", "prompt_too_long"),  # refusals
    *("EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError", "ToolParseError", "ToolCallError"),
)
"""Parts of errors that a limit or the model's answer caused, not the environment: the rubric's reward counts."""


def environment(
    env_id: str, *, python: str | None = None, sampling: Mapping[str, Any] | None = None, **arguments: Any
) -> Callable[[Episode], Awaitable[None]]:
    """Return an episode that plays the environment ``env_id`` with ``arguments``.

    ``python`` is an interpreter with ``verifiers``, this one by default.  ``sampling`` are arguments of the OpenAI
    client; without it the run's settings apply.  Raises PluginError if the environment does not load.
    """
    worker = _worker(env_id, json.dumps(arguments, sort_keys=True), python or sys.executable)
    worker.start()

    async def play(ep: Episode) -> None:
        if ROW not in ep.metadata:
            raise ValueError(f"the prompt has no metadata '{ROW}'; take prompts from {__name__}:prompts(...)")
        row = {**ep.metadata[ROW]}
        result = await worker.play(row, ep.openai_base_url, ep.api_key, dict(sampling or {}))
        if result["error"] is not None and not any(part in result["error"] for part in _OF_MODEL):
            raise EpisodeFailed(f"{env_id}: {result['error']}")
        ep.reward = float(result["reward"] or 0.0)
        ep.metadata.update((name, value) for name, value in (result.get("metrics") or {}).items() if name != ROW)

    return play


class _Worker:
    """The process of one environment.  It is started again if it ended."""

    def __init__(self, env_id: str, arguments: str, python: str) -> None:
        self._command = [python, str(WORKER), "serve", env_id, arguments]
        self._name = env_id
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-verifiers-")
        self._process: subprocess.Popen[str] | None = None
        self._starting = asyncio.Lock()
        atexit.register(self._leave)

    @property
    def _socket(self) -> str:
        return str(Path(self._folder.name, "socket"))

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready.  Raises PluginError."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        self._process = subprocess.Popen(
            [*self._command, self._socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        _ready(self._name, self._process.stdout)

    def stop(self) -> None:
        """End the process, which ends with its standard input, and wait for it."""
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes both ends
                process.kill()
        Path(self._socket).unlink(missing_ok=True)

    def _leave(self) -> None:
        self.stop()
        self._folder.cleanup()

    async def play(self, row: dict[str, Any], base_url: str, key: str, sampling: dict[str, Any]) -> dict[str, Any]:
        """Play one episode.  Cancelling it cancels the environment's rollout.  Raises EpisodeFailed."""
        async with self._starting:
            await off_loop(self.start, "verifiers")
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=_MOST_BYTES)
            try:
                request = {"row": row, "base_url": base_url, "api_key": key, "sampling": sampling}
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
        except OSError as error:
            raise EpisodeFailed(f"the process of the environment {self._name} is gone: {error}") from error
        if not line:
            raise EpisodeFailed(f"the process of the environment {self._name} ended during the episode")
        result: dict[str, Any] = json.loads(line)
        return result


@functools.cache
def _worker(env_id: str, arguments: str, python: str) -> _Worker:
    """Return the one process of these arguments: a run loads its function more than once."""
    return _Worker(env_id, arguments, python)


def _ready(env_id: str, lines: IO[str]) -> None:
    """Wait for the first line of a process.  Raises PluginError if it tells an error."""
    line = lines.readline()
    said = json.loads(line) if line else {"error": "its process ended at the start; see the log"}
    if "error" in said:
        error = said["error"]
        if "No module named 'verifiers'" in error:
            error = "the interpreter has no package verifiers; install asyncrl[verifiers], or give python='...'"
        raise PluginError(f"the environment '{env_id}' does not load: {error}")


# ---- its data set


class prompts:
    """A data source: the rows of an environment's data set, in a new order in each epoch.

    The order depends on ``seed``.  Checkpoints hold the position.  Raises PluginError if the environment does not load
    or has no rows.
    """

    def __init__(
        self, env_id: str, *, python: str | None = None, split: str = "train", seed: int = 0, **arguments: Any
    ) -> None:
        self._rows = [*rows(env_id, python=python, split=split, **arguments)]
        if not self._rows:
            raise PluginError(f"the environment '{env_id}' has no rows in the split '{split}'")
        self._seed, self._taken, self._epoch = seed, 0, -1
        self._order: list[int] = []

    def take(self) -> NewPrompt:
        """Return the next prompt."""
        epoch, place = divmod(self._taken, len(self._rows))
        if epoch != self._epoch:
            self._order = random.Random(f"{self._seed} {epoch}").sample(range(len(self._rows)), len(self._rows))
            self._epoch = epoch
        self._taken += 1
        return _prompt(self._rows[self._order[place]])

    def state(self) -> int:
        """Return the number of prompts that were taken."""
        return self._taken

    def load(self, state: int) -> None:
        """Continue behind that many prompts."""
        self._taken = state


def rows(env_id: str, *, python: str | None = None, split: str = "train", **arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an environment's data set, read in a process.  Raises PluginError."""
    command = [python or sys.executable, str(WORKER), "rows", env_id, json.dumps(arguments), split]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        _ready(env_id, process.stdout)
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise PluginError(f"the environment '{env_id}' failed while its rows were read; see the log")


def _prompt(row: dict[str, Any]) -> NewPrompt:
    return NewPrompt(prompt=row["prompt"] or "", label=row.get("answer"), metadata={ROW: row})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows of a data set as JSON lines."""
    parser = argparse.ArgumentParser(prog="asyncrl.rollouts.environments.verifiers", description="Rows as JSON lines.")
    parser.add_argument("env_id", help="Environment.")
    parser.add_argument("--split", choices=("train", "eval"), default="eval", help="Data set of the environment.")
    parser.add_argument("--arguments", type=json.loads, default={}, help="Arguments of the environment as JSON.")
    parser.add_argument("--python", help="Interpreter with verifiers.")
    options = parser.parse_args(arguments)
    try:
        for row in rows(options.env_id, python=options.python, split=options.split, **options.arguments):
            prompt = _prompt(row)
            line = {"prompt": prompt.prompt, "label": prompt.label, "metadata": prompt.metadata}
            sys.stdout.write(json.dumps(line) + "\n")
    except PluginError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
