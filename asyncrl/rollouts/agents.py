"""Episodes of agents: ``--agent-command`` is started once per episode and reaches the model through the gateway."""

import asyncio
import contextlib
import logging
import math
import os
import shlex
import shutil
import signal
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from logging.handlers import RotatingFileHandler
from pathlib import Path

import orjson

from asyncrl.daemon_threads import off_loop
from asyncrl.episodes import EpisodeEnd, EpisodeOutcome, EpisodeStart, EpisodeTurns
from asyncrl.errors import EpisodeFailed
from asyncrl.event_loop import Deadline
from asyncrl.rollouts.interfaces import EpisodeAddress, Gateway
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession, Verdict
from asyncrl.rollouts.stray_processes import StrayScans
from asyncrl.types import Reward, is_usable

logger = logging.getLogger(__name__)

_PIPES_S = 2.0
"""Seconds to read the rest of an agent's output.  A process that left its session may hold the pipes open."""
_TAIL_BYTES = 32_768
"""Bytes of the end of an agent's output, and of its errors, that are kept."""
_TAIL_LINES = 5
"""Lines of its errors that an error of ours quotes."""
_RESULT_BYTES = 16 << 20
"""Bytes of the file of ASYNCRL_RESULT, at most."""
_LOG_BYTES = 32 << 20
"""Bytes of the log of all agents, after which it is renamed and begun again."""
_LIMITS = (EpisodeEnd.MAX_TURNS, EpisodeEnd.CONTEXT_FULL)
"""Ends that make many agents fail, because the model refuses their next request: these episodes are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of agents."""

    command: str
    model_name: str
    log_path: Path
    """Log of the ends of all agents' outputs."""
    term_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""


class AgentCommand:
    """An ``EpisodeFn`` that runs a command, and gives it the address and the key of its episode.

    The command's reward, if it writes one to the file that ``ASYNCRL_RESULT`` names, goes before the reward function.
    The pipeline cancels it after ``--episode-timeout-s``, without the time in which its group is interrupted.
    """

    def __init__(
        self,
        settings: AgentSettings,
        gateway: Gateway,
        limits: EpisodeLimits,
        decode: Callable[[tuple[int, ...]], str],
    ) -> None:
        self._settings = settings
        self._gateway = gateway
        self._limits = limits
        self._decode = decode
        self._words = shlex.split(settings.command)
        self._log = _AgentLog(settings.log_path)
        self._strays = StrayScans()

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        """See ``EpisodeFn``."""
        session = EpisodeSession(start, turns, self._limits, self._decode)
        try:
            folder = _new_folder()
        except OSError as error:
            raise EpisodeFailed(f"{start.name}: no folder for the agent's task: {error}") from error
        address = self._gateway.open(session)
        try:
            await off_loop(partial(_write_task, start, folder), "agent-task")
            verdict = await self._verdict(session, address, folder)
        finally:
            self._gateway.close(address)
            session.close(EpisodeEnd.CANCELLED)  # the first reason stays
            await off_loop(partial(shutil.rmtree, folder, ignore_errors=True), "agent-folder")
        try:
            return session.outcome(verdict)
        except ValueError as error:
            raise EpisodeFailed(f"{start.name}: {error}") from error

    async def _verdict(self, session: EpisodeSession, address: EpisodeAddress, folder: Path) -> Verdict:
        """Run the agent.  Raises EpisodeFailed."""
        name = session.start.name
        environment = {**os.environ, **_environment(self._settings, address, folder)}
        environment.pop("ANTHROPIC_AUTH_TOKEN", None)  # it would go before the key of the episode
        agent = _Agent(self._words, environment, self._settings.term_s, self._strays)
        try:
            code = await agent.run()
        except OSError as error:
            line = f"{name}: the agent did not start: {self._words[0]}: {error.strerror} (agent-command)"
            raise EpisodeFailed(line) from error
        finally:
            await off_loop(partial(self._log.note, name, bytes(agent.output), bytes(agent.errors)), "agent-log")
        if code != 0 and session.end not in _LIMITS:
            raise EpisodeFailed(f"{name}: the agent ended with code {code}: {_last_lines(agent)}")
        verdict = await off_loop(partial(_result, name, folder / "result.json"), "agent-result")
        session.close(session.end or EpisodeEnd.FINISHED)
        return verdict


def _environment(settings: AgentSettings, address: EpisodeAddress, folder: Path) -> dict[str, str]:
    url = f"http://{address.host}:{address.port}"
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), address.host)))
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": address.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": address.key,
        "ASYNCRL_MODEL": settings.model_name,
        "ASYNCRL_EPISODE": str(folder / "episode.json"),
        "ASYNCRL_RESULT": str(folder / "result.json"),
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _new_folder() -> Path:
    """Make the folder of an episode: on the loop, because a cancelled thread would leave it."""
    return Path(tempfile.mkdtemp(prefix="asyncrl-agent-"))


def _write_task(start: EpisodeStart, folder: Path) -> None:
    """Write the task of the episode.  Raises EpisodeFailed."""
    prompt = start.prompt
    task = {
        "prompt": prompt.text,
        "messages": prompt.messages,
        "label": prompt.label,
        "metadata": prompt.metadata,
        "name": start.name,
        "index": start.index,
        "seed": start.seed,
        "evaluation": start.data_set is not None,
        "data_set": start.data_set,
    }
    try:
        (folder / "episode.json").write_bytes(orjson.dumps(task, default=str, option=orjson.OPT_NON_STR_KEYS))
    except (OSError, orjson.JSONEncodeError) as error:
        raise EpisodeFailed(f"{start.name}: the task cannot be written for the agent: {error}") from error


def _result(name: str, path: Path) -> Verdict:
    """Return what the agent wrote to ``ASYNCRL_RESULT``.  Raises EpisodeFailed."""
    try:
        if not path.exists():
            return Verdict()
        if not path.is_file() or path.stat().st_size > _RESULT_BYTES:  # the model may have made it
            raise EpisodeFailed(f"{name}: ASYNCRL_RESULT must be a file of at most {_RESULT_BYTES >> 20} MiB")
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise EpisodeFailed(f"{name}: the file of ASYNCRL_RESULT is not JSON: {error}") from error
    reward = found.get("reward") if isinstance(found, dict) else math.nan
    metadata = found.get("metadata") or {} if isinstance(found, dict) else {}
    is_number = is_usable(reward) and not isinstance(reward, bool)
    if not (reward is None or is_number) or not isinstance(metadata, dict):
        raise EpisodeFailed(
            f'{name}: the file of ASYNCRL_RESULT must be {{"reward": NUMBER, "metadata": {{...}}}}, got {found!r:.80}'
        )
    rewards = {} if reward is None else {0: Reward(value=float(reward))}
    return Verdict(rewards=rewards, metadata=metadata)


class _Agent:
    """One run of the command, in a new session."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], term_s: float, strays: StrayScans) -> None:
        """``ASYNCRL_EPISODE`` in the environment is another one for each agent."""
        self.output = bytearray()
        self.errors = bytearray()
        self._words = words
        self._environment = environment
        self._term_s = term_s
        self._strays = strays
        self._mark = os.fsencode(f"ASYNCRL_EPISODE={environment['ASYNCRL_EPISODE']}")

    async def run(self) -> int:
        """Run the command to its end and return its exit code.  Cancelling ends all of its processes."""
        with contextlib.ExitStack() as pipes:
            output = pipes.enter_context(contextlib.closing(_Pipe(self.output)))
            errors = pipes.enter_context(contextlib.closing(_Pipe(self.errors)))
            try:
                return await self._run(output.write_end, errors.write_end)
            finally:
                with contextlib.suppress(TimeoutError):
                    async with Deadline(_PIPES_S):
                        await output.has_ended.wait()
                        await errors.has_ended.wait()

    async def _run(self, output: FileIO, errors: FileIO) -> int:
        """Start the command, wait for its end, and end what it left."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=DEVNULL,
                stdout=output,
                stderr=errors,
                env=self._environment,
                start_new_session=True,
            )
        finally:
            output.close()
            errors.close()
        try:
            return await process.wait()
        finally:
            await _end(process, self._term_s)
            await self._strays.kill(process.pid, self._mark)


class _Pipe:
    """A pipe whose read end keeps the end of what an agent writes.

    With ``subprocess.PIPE``, ``Process.wait`` would wait for all processes that hold the pipe, not for the agent alone.
    """

    # Invariant: only this object closes the file descriptors, and the loop no longer watches the read end by then.
    # Not a transport: the one of uvloop 0.23 closes the descriptor itself, and then the file object.  In between,
    # another thread may have opened a file of that number.

    def __init__(self, tail: bytearray) -> None:
        self.has_ended = asyncio.Event()
        """Set when no process holds the write end any more."""
        self._tail = tail
        self._fd, write_end = os.pipe()
        self._read_end, self.write_end = FileIO(self._fd, "r"), FileIO(write_end, "w")
        os.set_blocking(self._fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Close both ends."""
        self._loop.remove_reader(self._fd)
        self._read_end.close()
        self.write_end.close()

    def _read(self) -> None:
        piece = self._read_end.read(_TAIL_BYTES)
        if piece:
            self._tail += piece
            del self._tail[:-_TAIL_BYTES]
        elif piece is not None:  # None: nothing to read yet
            self._loop.remove_reader(self._fd)
            self.has_ended.set()


async def _end(process: Process, term_s: float) -> None:
    """End the agent and the processes of its group: SIGTERM, then SIGKILL."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with Deadline(term_s):
                await process.wait()
    _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _last_lines(agent: _Agent) -> str:
    said = (agent.errors or agent.output).decode(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in said[-_TAIL_LINES:]) or "no output"


class _AgentLog:
    """The log of all agents of a run: the end of each one's output, with a limit for the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1, delay=True)

    def note(self, name: str, output: bytes, errors: bytes) -> None:
        """Append the end of an agent's output.  Safe to call from any thread."""
        for kind, said in (("stdout", output), ("stderr", errors)):
            if said:
                text = f"=== {name} {kind}\n{said.decode(errors='replace').rstrip()}"
                self._handler.handle(logging.makeLogRecord({"msg": text}))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()
