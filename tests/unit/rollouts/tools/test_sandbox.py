"""The sandbox: each limit, on real processes, with every isolation that this machine allows."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.errors import SandboxFailed
from asyncrl.rollouts.tools.sandbox import Isolation, Sandbox, SandboxResult

ISOLATIONS: tuple[Isolation, ...] = ("root", "user", "limits")


@cache
def works(isolation: Isolation) -> bool:
    if isolation == "root" and os.geteuid() != 0:
        return False
    try:
        return asyncio.run(sandbox(isolation).python("print(1)")).is_ok
    except SandboxFailed:
        return False


def sandbox(isolation: Isolation, **limits: Any) -> Sandbox:
    limits = {"memory_mb": 256, "disk_mb": 4, "max_files": 50, "max_processes": 20} | limits
    return Sandbox(isolation=isolation, network=isolation == "limits", **limits)


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> Iterator[Isolation]:
    if not works(request.param):
        pytest.skip(f"this machine does not allow the isolation {request.param}")
    yield request.param


@pytest.fixture(params=ISOLATIONS[:2])
def namespaces(request: pytest.FixtureRequest) -> Iterator[Isolation]:
    if not works(request.param):
        pytest.skip(f"this machine does not allow the isolation {request.param}")
    yield request.param


def run(code: str, isolation: Isolation, *, stdin: str = "", **limits: Any) -> SandboxResult:
    return asyncio.run(sandbox(isolation, **limits).python(code, stdin=stdin))


def test_code_reads_its_input_and_its_output_is_the_text(isolation: Isolation) -> None:
    result = run("import sys; print(sys.stdin.read()[::-1]); print('warned', file=sys.stderr)", isolation, stdin="abc")
    assert (result.text, result.exit_code, result.is_ok) == ("cba\nwarned", 0, True)


def test_shell_command_tells_its_exit_code(isolation: Isolation) -> None:
    result = asyncio.run(sandbox(isolation).shell("echo hi; exit 3"))
    assert (result.text, result.exit_code, result.is_ok) == ("hi\n[exit code 3]", 3, False)


def test_cpu_time_is_limited(isolation: Isolation) -> None:
    result = run("while True: pass", isolation, cpu_s=1)
    assert result.text == "[ended by the limit of CPU time]"
    assert not result.is_late


def test_wall_time_is_limited_for_the_whole_tree(isolation: Isolation) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\nprint('up', flush=True)\ntime.sleep(1234.5)"
    began = time.monotonic()
    result = run(code, isolation, wall_s=5.0)
    assert result.is_late
    assert result.text == "up\nup\n[time limit exceeded]"
    assert time.monotonic() - began < 15
    assert not sleeping("1234.5")


def test_processes_that_are_left_end_with_the_program(isolation: Isolation) -> None:
    start = "if os.fork() == 0:\n    os.setsid()\n    os.execlp('sleep', 'sleep', '2345.5')"
    assert run(f"import os, time\n{start}\ntime.sleep(0.2)", isolation).is_ok
    assert not sleeping("2345.5")


def test_cancelled_call_ends_its_processes(isolation: Isolation) -> None:
    async def cancelled() -> None:
        box = sandbox(isolation)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(box.shell("sleep 3456.5"))
            while not sleeping("3456.5"):  # noqa: ASYNC110 - the state of another process
                await asyncio.sleep(0.02)
            task.cancel()

    asyncio.run(cancelled())
    assert not sleeping("3456.5")


def test_memory_is_limited(isolation: Isolation) -> None:
    result = run("x = bytearray(10**9)", isolation)
    assert "MemoryError" in result.stderr
    assert result.exit_code == 1


def test_one_file_is_limited(isolation: Isolation) -> None:
    result = run("open('f', 'wb').write(b'x' * 10**7)", isolation)
    assert "No space left" in result.stderr or "File too large" in result.stderr


def test_output_is_cut_and_said(isolation: Isolation) -> None:
    result = run("print('a' * 10**7)", isolation, max_output=100)
    assert result.text == "a" * 100 + "\n[output truncated]"
    assert result.is_ok


def test_environment_of_the_run_is_not_seen(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "1")
    result = run(
        "import os; print('SECRET_OF_THE_RUN' in os.environ, os.environ['MINE'])", isolation, environment={"MINE": "x"}
    )
    assert result.stdout == "False x\n"


def test_private_directories_are_removed(isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("open('left', 'w').write('x')", isolation).is_ok
    assert list(tmp_path.iterdir()) == []


def test_calls_that_are_cancelled_at_any_moment_take_no_slot_and_leave_no_directory(
    isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled_after(turns: int, box: Sandbox) -> None:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(box.shell("true"))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()

    async def scenario() -> SandboxResult:
        box = sandbox(isolation, max_running=1)
        for turns in (1, 2, 3, 5, 10):
            await cancelled_after(turns, box)
        await asyncio.sleep(0.1)  # for threads that make a directory late
        assert os.listdir(tmp_path) == []
        return await box.shell("echo hi")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert asyncio.run(scenario()).text == "hi"


def test_a_machine_without_room_for_a_directory_is_one_clear_line_and_takes_no_slot(
    isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> SandboxResult:
        box = sandbox(isolation, max_running=1)
        with monkeypatch.context() as broken:
            broken.setattr("tempfile.tempdir", str(tmp_path / "missing"))
            for _ in range(2):
                with pytest.raises(SandboxFailed, match=r"could not start the program: No such file or directory$"):
                    await box.shell("true")
        return await box.shell("echo hi")

    assert asyncio.run(scenario()).text == "hi"


def test_shared_memory_is_limited(namespaces: Isolation) -> None:
    if namespaces != "root":
        pytest.skip("an unprivileged user may not set the limit before Linux 6.1")
    program = """
import ctypes
libc = ctypes.CDLL(None)
print(sum(libc.shmget(0, 16 << 20, 0o1600) >= 0 for _ in range(40)) * 16)
"""
    assert 128 <= int(run(program, namespaces).stdout) <= 256


def test_number_of_files_is_limited(namespaces: Isolation) -> None:
    assert "No space left" in run("for i in range(100): open(str(i), 'w')", namespaces).stderr


def test_network_is_closed(namespaces: Isolation) -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', 22), timeout=1)"
    assert "Network is unreachable" in run(code, namespaces).stderr


def test_files_of_the_machine_cannot_be_written(namespaces: Isolation, tmp_path: Path) -> None:
    here = Path.cwd() / "written"
    result = run(f"open({str(here)!r}, 'w')", namespaces)
    assert not here.exists()
    assert result.exit_code == (0 if is_within(here, "/tmp") and namespaces == "user" else 1)  # the sandbox's own /tmp
    assert "No such file" in run(f"open({str(tmp_path / 'written')!r}, 'w')", namespaces).stderr


def test_processes_and_temporary_files_of_others_are_not_seen(namespaces: Isolation) -> None:
    result = run("import os; print(*os.listdir('/tmp'), sum(n.isdigit() for n in os.listdir('/proc')))", namespaces)
    *seen, num_processes = result.stdout.split()
    pythons = {Path(path).parts[2] for path in (sys.prefix, Path.cwd()) if is_within(Path(path), "/tmp")}
    assert "work" in seen and set(seen) <= {"work", *pythons}
    assert num_processes == "2"


def is_within(path: Path, folder: str) -> bool:
    return path.is_relative_to(folder)


def test_number_of_processes_is_limited() -> None:
    if not works("root"):
        pytest.skip("the kernel exempts root, and counts the processes of other users together")
    result = run("import os, time\nfor i in range(100):\n    if os.fork() == 0:\n        time.sleep(50)", "root")
    assert "Resource temporarily unavailable" in result.stderr


def test_programs_wait_for_their_turn() -> None:
    async def overlapping() -> int:
        box = Sandbox(isolation="limits", network=True, max_running=2)
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(box.shell("date +%s%N; sleep 0.3; date +%s%N")) for _ in range(5)]
        times = [tuple(map(int, call.result().stdout.split())) for call in calls]
        return max(sum(start <= moment < stop for start, stop in times) for moment, _ in times)

    assert asyncio.run(overlapping()) == 2


SURROGATE, NUL = "the text is not valid Unicode: ", "the command contains a NUL character"


@pytest.mark.parametrize(
    ("argv", "files", "stdin", "seen"),
    [
        (["/bin/cat", "main.py"], {"main.py": "\ud83d"}, "", SURROGATE),
        (["/bin/cat"], {}, "\ud83d", SURROGATE),
        (["/bin/echo", "\ud83d"], {}, "", SURROGATE),
        (["/bin/echo", "a\0b"], {}, "", NUL),
        (["/bin/true"], {"a\0b": ""}, "", NUL),
    ],
    ids=["file", "stdin", "argument", "NUL in an argument", "NUL in a name"],
)
def test_text_that_no_program_can_get_is_one_line_for_the_model(
    isolation: Isolation, argv: list[str], files: dict[str, str], stdin: str, seen: str
) -> None:
    result = asyncio.run(sandbox(isolation).run(argv, files=files, stdin=stdin))
    assert result.text.startswith(seen)
    assert (len(result.text.splitlines()), result.exit_code, result.is_ok) == (1, 1, False)


def test_bytes_of_a_command_that_are_not_utf8_arrive(isolation: Isolation) -> None:
    result = asyncio.run(sandbox(isolation).shell("printf '\udcff' | od -An -tx1"))
    assert result.text.strip() == "ff"


def test_environment_that_cannot_be_set_is_one_clear_line(isolation: Isolation) -> None:
    with pytest.raises(SandboxFailed, match=r"could not start the program: embedded null byte$"):
        asyncio.run(sandbox(isolation, environment={"MINE": "a\0b"}).shell("true"))


def test_program_that_does_not_exist_is_one_clear_line(isolation: Isolation) -> None:
    with pytest.raises(SandboxFailed, match="could not start the program: No such file or directory"):
        asyncio.run(sandbox(isolation).run(["no-such-program"]))


def sleeping(seconds: str) -> bool:
    """Return whether a process of a test is still there, by its unlikely argument."""
    return any(seconds in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
