"""A process that plays an environment of the package ``verifiers``, for ``asyncrl.rollouts.environments.verifiers``.

    python verifiers_worker.py serve ENV_ID ARGUMENTS SOCKET     one connection per episode: a line of JSON each way
    python verifiers_worker.py rows  ENV_ID ARGUMENTS SPLIT      a line of JSON per row of its data set

The first line of the standard output is ``{"ready": true}`` or ``{"error": "..."}``.  The process has an interpreter
with ``verifiers`` and imports nothing of asyncrl: environments install signal handlers, bring their own versions of
packages, and may block.  It ends when its standard input does.
"""

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Protocol

MODEL = "asyncrl"
_numbers = itertools.count()


class Played(Protocol):
    """An environment of one generation of ``verifiers``."""

    def rows(self, split: str) -> Iterable[dict[str, Any]]:
        """Yield the rows of a split: ``prompt``, ``answer`` and all else that an episode needs."""

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Hold what the environment shares between episodes."""

    async def play(self, row: dict[str, Any], address: dict[str, Any]) -> dict[str, Any]:
        """Run one episode; return ``reward``, ``metrics`` and ``error``."""


class Classic:
    """An environment of versions before 0.4: ``load_environment`` of its module returns ``verifiers.Environment``."""

    def __init__(self, env_id: str, arguments: dict[str, Any]) -> None:
        self._environment = importlib.import_module("verifiers").load_environment(env_id, **arguments)
        self._config = importlib.import_module("verifiers.types").ClientConfig

    def rows(self, split: str) -> Iterable[dict[str, Any]]:
        found = self._environment.get_eval_dataset() if split == "eval" else self._environment.get_dataset()
        for row in found:
            yield dict(row)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def play(self, row: dict[str, Any], address: dict[str, Any]) -> dict[str, Any]:
        with key_variable(address["api_key"]) as variable:
            # The gateway repeats what is worth repeating, so the client must not.
            client = self._config(api_key_var=variable, api_base_url=address["base_url"], max_retries=0)
            output = await self._environment.run_rollout(row, client, MODEL, dict(address["sampling"]))
        error = output.get("error")
        return {
            "reward": output.get("reward"),
            "metrics": dict(output.get("metrics") or {}),
            "error": None if error is None else str(error.get("error_chain_repr", error)),
        }


class Taskset:
    """An environment of version 0.4 and above: a taskset, and the agents that play it."""

    def __init__(self, env_id: str, arguments: dict[str, Any]) -> None:
        v1 = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        taskset = {**arguments.get("taskset", {}), "id": env_id}
        config = loaders.resolve_env_config({**arguments, "taskset": taskset})
        self._environment, self._v1 = loaders.load_environment(config), v1
        self._task = type(self._environment.taskset).task_type()

    def rows(self, split: str) -> Iterable[dict[str, Any]]:
        for task in self._environment.taskset:
            data = task.data.model_dump(mode="json")
            yield {"prompt": data.get("prompt"), "answer": data.get("answer"), "data": data}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self._environment.serving():
            yield

    async def play(self, row: dict[str, Any], address: dict[str, Any]) -> dict[str, Any]:
        data = self._task.data_type().model_validate(row["data"])
        with key_variable(address["api_key"]) as variable:
            client = self._v1.EvalClientConfig(base_url=address["base_url"], api_key_var=variable)
            context = self._v1.ModelContext(model=MODEL, client=client, **sampling_of(self._v1, address["sampling"]))
            task = self._task(data, self._environment.config.taskset.task)
            episode = await self._environment.run_episode(task, context)
        errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
        rewards = [float(trace.reward) for trace in episode.traces]
        return {
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "metrics": {name: value for trace in episode.traces for name, value in trace.metrics.items()},
            "error": None
            if episode.ok
            else "; ".join(f"{error.type}: {error.message}" for error in errors) or "not ok",
        }


def sampling_of(v1: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    return {"sampling": v1.SamplingConfig(**sampling)} if sampling else {}


@contextlib.contextmanager
def key_variable(key: str) -> Iterator[str]:
    """Hold a key in an environment variable, because all versions take the name of one."""
    name = f"ASYNCRL_EPISODE_KEY_{next(_numbers)}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


def load(env_id: str, arguments: dict[str, Any]) -> Played:
    sys.path[0] = os.getcwd()  # environments lie there; this file's folder has another module ``verifiers``
    if hasattr(importlib.import_module("verifiers"), "load_environment"):
        return Classic(env_id, arguments)
    return Taskset(env_id, arguments)


async def serve(played: Played, path: str, say: Any) -> None:
    async def episode(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Play one episode; the adapter closes the connection to cancel it."""
        request = json.loads(await reader.readline())
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(answer(played, request))
            leaving = tasks.create_task(cancel_at_end(reader, playing))
            playing.add_done_callback(lambda _: leaving.cancel())
        if not playing.cancelled():
            writer.write(json.dumps(playing.result(), default=str).encode() + b"\n")
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()

    async with played.serving():
        server = await asyncio.start_unix_server(episode, path, limit=1 << 26)
        say({"ready": True})
        async with server:
            await server.serve_forever()


async def answer(played: Played, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return await played.play(request["row"], request)
    except Exception as error:  # noqa: BLE001 - an environment may raise anything, which costs its episode
        return {"error": f"{type(error).__name__}: {error}", "reward": None}


async def cancel_at_end(reader: asyncio.StreamReader, playing: asyncio.Task[Any]) -> None:
    await reader.read()
    playing.cancel()


def main() -> None:
    mode, env_id, arguments, target = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # environments print

    def say(value: Any) -> None:
        lines.write(json.dumps(value, default=str) + "\n")
        lines.flush()

    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        played = load(env_id, json.loads(arguments))
    except BaseException as error:  # noqa: BLE001 - any failure is one line in the parent
        cause = error.__cause__ or error
        say({"error": f"{type(cause).__name__}: {cause}"})
        os._exit(2)
    if mode == "rows":
        say({"ready": True})
        for row in played.rows(target):
            say(row)
        lines.flush()
        os._exit(0)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    asyncio.run(serve(played, target, say))


if __name__ == "__main__":
    main()
