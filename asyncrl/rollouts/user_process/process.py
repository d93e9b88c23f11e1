"""One process of user code, from its start to its end, without restarts.

The checks before a run use it without an event loop, by ``load``.  The run then adopts the same process, so that user
code is imported once.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from asyncrl.errors import PluginError, UserProcessFailed
from asyncrl.rollouts.user_process.messages import Load, Loaded, in_controller, to_process
from asyncrl.rollouts.user_process.plain_values import unpacked
from asyncrl.rollouts.user_process.wire import WireBroken, receive_now, send_now

WORKER = "asyncrl.rollouts.user_process.worker"
_ROOT = str(Path(__file__).parents[3])
"""The folder that holds the package."""
_MARK = "ASYNCRL_USER_CODE"
"""Variable of the environment that tells the processes of one process of user code, also if that is dead."""
_KILL_S = 5.0
"""Seconds for the kernel to remove killed processes."""
_MOST_SHOWN = 300
"""Characters of a log line that an error message quotes at most."""


class UserCodeProcess:
    """A started process.  It leads a session, so that all processes of user code can be ended with it."""

    def __init__(self) -> None:
        """Start the process.  Raises UserProcessFailed.

        Invariant: the thread that calls this outlives the process, because the kernel ends the process with it.
        """
        self._is_gone = False
        self.end, others_end = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (``kill`` closes it)
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        number = str(others_end.fileno())
        mark = uuid4().hex
        self._mark = f"{_MARK}={mark}".encode()
        try:
            # -P: a user's random.py in the working directory must not replace the standard library's before it starts.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", WORKER, number, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(others_end.fileno(),),
                env={**os.environ, "PYTHONPATH": path, _MARK: mark},
                start_new_session=True,
            )
        except OSError as error:
            self.end.close()
            raise UserProcessFailed(f"the process of user code did not start: {error}") from error
        finally:
            others_end.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def load(self, program: str, factory: bytes, timeout_s: float, label: str) -> dict[str, Any]:
        """Make a program in the process and return its facts.  Blocks.  Raises PluginError with one line."""
        self.end.settimeout(timeout_s)
        try:
            send_now(self.end, to_process(Load(program, factory)))
            answer = in_controller(unpacked(receive_now(self.end)))
        except TimeoutError:
            self.kill()
            raise PluginError(f"{label}: its import did not end within {timeout_s:g} s (start-timeout-s)") from None
        except WireBroken:
            text = f"{label}: its import ended the process: {self.how_it_ended()}"
            self.kill()
            raise PluginError(text) from None
        return facts_of(answer)

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process, in a thread; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """Describe the end of a process whose socket was closed.  Blocks for up to a second."""
        self.wait(1.0)
        code = self._process.poll()
        if code is None:
            return "it closed its socket"
        if code < 0:
            hint = "; the kernel does this when memory is full" if code == -signal.SIGKILL else ""
            return f"signal {-code}, {signal.strsignal(-code)}{hint}"
        return f"exit code {code}"

    def early_output(self) -> bytes:
        """Return what the process wrote before it had a log file."""
        self._output.seek(0)
        return self._output.read()

    def kill(self) -> None:
        """Kill the process and all that it started; return when they are gone.  Safe to call twice.  Blocks."""
        if self._is_gone:  # its number may be another process's by now
            return
        self._is_gone = True
        family = self._family()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=_KILL_S)
        self.wait(_KILL_S)
        self.end.close()
        self._output.close()

    def _family(self) -> list[psutil.Process]:
        """Return the processes of the session, the descendants that left it, and all others with its environment."""
        family: dict[int, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.pid)
            family = {each.pid: each for each in (leader, *leader.children(recursive=True))}
        for pid in psutil.pids():  # psutil.process_iter() would take 30 times as long, holding the interpreter
            with suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.pid or self._mark in Path(f"/proc/{pid}/environ").read_bytes():
                    family[pid] = psutil.Process(pid)
        return list(family.values())


def facts_of(answer: object) -> dict[str, Any]:
    """Return the facts of a program that was loaded.  Raises PluginError, or UserProcessFailed for a bug of ours."""
    if not isinstance(answer, Loaded):
        raise UserProcessFailed(f"the process of user code answered {type(answer).__name__} to Load")
    if answer.error is not None:
        raise (PluginError if answer.is_mistake else UserProcessFailed)(answer.error)
    return answer.facts
