"""A sandbox for code that a model wrote: processes without network, with little memory, time and disk.

    sandbox = Sandbox(cpu_s=5, memory_mb=512)
    result = await sandbox.python("print(2**100)")
    result.text                       # what the model should see

Linux only.  ``docs/guides/tools.md`` says what the limits hold, and what they do not.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.daemon_threads import off_loop
from asyncrl.errors import SandboxFailed, plainly
from asyncrl.event_loop import loop_time
from asyncrl.task_groups import TaskGroup

type Isolation = Literal["root", "user", "uid", "limits"]
"""``root``: namespaces and a user id without rights.  ``user``: namespaces of an unprivileged user.  ``uid``: a user
id without rights, for root in a container.  ``limits``: limits alone."""

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_HIDDEN = ("/root", "/home", "/run", "/var/tmp", "/dev/shm")
"""Directories with private files, sockets or room to write.  The code sees them empty, but for its interpreter."""
_LINGER_S = 2.0
"""Time for a sandbox to end after its limit, before its starter is killed."""
_FIRST_UID = 1 << 30
"""User ids above those of people and services: each slot of each process has its own, so the kernel counts apart."""
_slots = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The end of one run in a sandbox."""

    stdout: str
    stderr: str
    exit_code: int
    """Exit code of the program; minus the number of the signal that ended it."""
    seconds: float
    cpu_s: float
    """CPU time of the program and the processes that it waited for; 0 after the time limit."""
    is_late: bool = False
    """Whether the time limit ended the program."""
    is_truncated: bool = False
    """Whether output was cut."""

    @property
    def is_ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.is_late

    @property
    def text(self) -> str:
        """Output, errors and the way in which the program ended, for a model."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.is_truncated:
            parts.append("[output truncated]")
        if self.is_late:
            parts.append("[time limit exceeded]")
        elif self.exit_code < 0:
            parts.append(f"[ended by {_signal_name(-self.exit_code)}]")
        elif self.exit_code > 0 and not self.stderr:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join(part for part in parts if part)


@dataclass(slots=True, kw_only=True)
class Sandbox:
    """Runs code in processes with limits, a bounded number at a time.  Safe to use from many tasks of one loop.

    The constructor starts one process to try the isolation.  Raises SandboxFailed if the machine does not allow
    it and ``network`` is False.
    """

    cpu_s: int = 5
    """CPU seconds of each process."""
    wall_s: float = 10.0
    """Seconds from the start to the end."""
    memory_mb: int = 512
    """Address space of each process, in MiB."""
    disk_mb: int = 64
    """Size of the private directory, in MiB; also the limit for one file."""
    max_files: int = 1000
    """Files and folders in the private directory."""
    max_processes: int = 32
    """Processes and threads at once."""
    max_output: int = 10_000
    """Characters of standard output and of standard error that are kept."""
    max_running: int = 4
    """Programs that run at once; further calls wait."""
    network: bool = False
    """Allow the network.  On a machine without namespaces, True also gives up the private view of the file system."""
    python_path: str = sys.executable
    """Interpreter of ``python``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the code, which sees none of this process."""
    isolation: Isolation | None = None
    """Way of isolating; None is the strongest that the machine allows."""
    _free_uids: list[int] = field(default_factory=list, init=False)
    _running: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._running = asyncio.Semaphore(self.max_running)
        first = _FIRST_UID + os.getpid() % (1 << 18) * (1 << 12)
        self._free_uids = [first + next(_slots) % (1 << 12) for _ in range(self.max_running)]
        self.isolation = self.isolation or _strongest(self.network)

    async def python(self, code: str, *, stdin: str = "") -> SandboxResult:
        """Run Python code.  See ``run``."""
        return await self.run([self.python_path, "-B", "main.py"], files={"main.py": code}, stdin=stdin)

    async def shell(self, command: str, *, stdin: str = "") -> SandboxResult:
        """Run a command of /bin/sh.  See ``run``."""
        return await self.run(["/bin/sh", "-c", command], stdin=stdin)

    async def run(
        self, argv: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: str = ""
    ) -> SandboxResult:
        """Run a program in a new private directory with ``files``, as its name and arguments say.

        Every process that it starts has ended at the return.  Cancelling the call ends them.  Text that no program can
        get, such as half a surrogate pair, ends with exit code 1 and one line of errors.  Raises SandboxFailed if the
        program could not be started.
        """
        if (problem := _problem(argv, files or {}, stdin)) is not None:
            return SandboxResult(stdout="", stderr=problem, exit_code=1, seconds=0.0, cpu_s=0.0)
        async with self._running:
            uid = self._free_uids.pop()
            try:
                return await self._in_new_directory(argv, files or {}, stdin.encode(), uid)
            except OSError as error:
                raise SandboxFailed(f"the sandbox could not start the program: {error.strerror or error}") from error
            finally:
                self._free_uids.append(uid)

    async def _in_new_directory(
        self, argv: Sequence[str], files: Mapping[str, str], stdin: bytes, uid: int
    ) -> SandboxResult:
        # Both steps run on the loop: a thread that makes or fills the directory would outlive a cancellation.
        directory = tempfile.mkdtemp(prefix="asyncrl-sandbox-")
        try:
            _settings_file(directory).write_text(json.dumps(self._settings(argv, files, uid, directory)))
            return await self._run(directory, stdin)
        finally:
            await off_loop(functools.partial(shutil.rmtree, directory, ignore_errors=True), "sandbox")

    def _settings(self, argv: Sequence[str], files: Mapping[str, str], uid: int, directory: str) -> dict[str, Any]:
        return _settings(
            mode=self.isolation,
            uid=uid if self.isolation in ("root", "uid") else None,
            argv=[*argv],
            files=dict(files),
            directory=directory,
            network=self.network,
            wall_s=int(self.wall_s),
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_mb << 20,
            disk_bytes=self.disk_mb << 20,
            file_bytes=self.disk_mb << 20,
            max_files=self.max_files,
            max_processes=self.max_processes,
            shown=_interpreter_folders(self.python_path),
            environment={**_plain_environment(), **self.environment},
        )

    async def _run(self, directory: str, stdin: bytes) -> SandboxResult:
        began_s, is_late = loop_time(), False
        read_end, write_end = os.pipe()
        try:
            process = await _started(directory, write_end)
            os.close(write_end)
            write_end = -1
            outputs = [_Output(4 * self.max_output), _Output(4 * self.max_output)]
            try:
                async with asyncio.timeout(self.wall_s):
                    await _communicate(process, stdin, outputs)
            except TimeoutError:
                is_late = True
            finally:
                await _end(process)
            report = _report(read_end)
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)
        if "error" in report or not (report or is_late):
            raise SandboxFailed(f"the sandbox could not start the program: {report.get('error', 'no report')}")
        return self._result(report, outputs, loop_time() - began_s, is_late)

    def _result(
        self, report: Mapping[str, Any], outputs: "Sequence[_Output]", seconds: float, is_late: bool
    ) -> SandboxResult:
        texts = [bytes(output.data).decode(errors="replace") for output in outputs]
        return SandboxResult(
            stdout=texts[0][: self.max_output],
            stderr=texts[1][: self.max_output],
            exit_code=report.get("exit", -signal.SIGKILL),
            seconds=seconds,
            cpu_s=report.get("cpu_s", 0.0),
            is_late=is_late,
            is_truncated=any(output.is_cut for output in outputs) or max(map(len, texts)) > self.max_output,
        )


class _Output:
    """The first bytes of an output."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self.is_cut = False
        self._most = most

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        """Read to the end, so the program never waits for us; keep the first bytes."""
        while stream is not None and (piece := await stream.read(1 << 16)):
            room = self._most - len(self.data)
            self.data += piece[:room]
            self.is_cut |= len(piece) > room


async def _started(directory: str, report: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *_command(directory, report),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[report],
        start_new_session=True,
        env={},
    )


async def _communicate(process: asyncio.subprocess.Process, stdin: bytes, outputs: Sequence[_Output]) -> None:
    with plainly():
        async with TaskGroup() as tasks:
            for output, stream in zip(outputs, (process.stdout, process.stderr), strict=True):
                tasks.create_task(output.read(stream))
            tasks.create_task(_feed(process.stdin, stdin))
            await process.wait()


async def _feed(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    if stream is None:
        return
    with contextlib.suppress(ConnectionError):  # the program may end without reading
        stream.write(data)
        await stream.drain()
    stream.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the starter, and with it every process of the sandbox."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)  # in namespaces this ends the starter, and the kernel the rest
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _report(read_end: int) -> dict[str, Any]:
    os.set_blocking(read_end, False)
    try:
        lines = os.read(read_end, 1 << 16).splitlines()
    except BlockingIOError:
        return {}
    report: dict[str, Any] = json.loads(lines[0]) if lines else {}
    return report


def _command(directory: str, report: int) -> list[str]:
    return [sys.executable, "-I", "-S", str(_CHILD), str(_settings_file(directory)), str(report)]


def _problem(argv: Sequence[str], files: Mapping[str, str], stdin: str) -> str | None:
    """Return the reason why no program can get these texts, for the model; None if one can."""
    try:
        for name in (*argv, *files):
            if b"\0" in os.fsencode(name):
                return "the command contains a NUL character"
        for text in (*files.values(), stdin):
            text.encode()
    except UnicodeEncodeError as error:
        return f"the text is not valid Unicode: {error}"
    return None


def _settings_file(directory: str) -> Path:
    return Path(directory, ".settings.json")


def _plain_environment() -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",  # each thread of NumPy's library reserves address space
        "OMP_NUM_THREADS": "1",
    }


@functools.cache
def _interpreter_folders(python: str) -> list[str]:
    """Return the folders that an interpreter needs, so they are shown in hidden directories."""
    if python == sys.executable:
        return sorted({sys.prefix, sys.base_prefix})
    asked = subprocess.run(
        [python, "-I", "-c", "import sys; print(sys.prefix); print(sys.base_prefix)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return sorted(set(asked.stdout.split()))


def _signal_name(number: int) -> str:
    if number == signal.SIGXCPU:
        return "the limit of CPU time"
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


# ---- trying what the machine allows


def _settings(**values: Any) -> dict[str, Any]:
    return {"hidden": _HIDDEN, **values}


@functools.cache
def _strongest(network: bool) -> Isolation:
    """Return the strongest isolation that works.  Raises SandboxFailed if it would leave the network open."""
    modes: tuple[Isolation, ...] = ("root", "user") if os.geteuid() == 0 else ("user",)
    reasons = []
    for mode in modes:
        reason = _try(mode, network)
        if reason is None:
            return mode
        reasons.append(reason)
    if network and os.geteuid() == 0 and _try("uid", network) is None:
        log.warning("the sandbox has no namespaces here (%s): code in it sees the files that all can read", reasons[-1])
        return "uid"
    if network:
        log.warning("the sandbox has no namespaces here (%s): code in it has the rights of this user", reasons[-1])
        return "limits"
    raise SandboxFailed(
        f"the sandbox cannot keep code from the network on this machine ({reasons[-1]}); "
        "allow user namespaces, or give Sandbox(network=True)"
    )


def _try(mode: Isolation, network: bool) -> str | None:
    """Return the reason why ``mode`` does not work, None if it does."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-") as directory:
        settings = _settings(
            mode=mode,
            uid=_FIRST_UID if mode in ("root", "uid") else None,
            argv=[sys.executable, "-I", "-S", "-c", ""],
            files={},
            directory=directory,
            network=network,
            wall_s=20,
            cpu_s=10,
            memory_bytes=1 << 30,
            disk_bytes=1 << 20,
            file_bytes=1 << 20,
            max_files=100,
            max_processes=8,
            shown=_interpreter_folders(sys.executable),
            environment=_plain_environment(),
        )
        _settings_file(directory).write_text(json.dumps(settings))
        read_end, write_end = os.pipe()
        try:
            subprocess.run(
                _command(directory, write_end), pass_fds=[write_end], check=False, timeout=30, capture_output=True
            )
            report = _report(read_end)
        finally:
            os.close(read_end)
            os.close(write_end)
    return None if report.get("exit") == 0 else str(report.get("error", f"the trial ended with {report or 'nothing'}"))
