"""No process of a session is left, however the driver ends, and no other process is touched."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.engines.cluster.ray_files import session_folder
from asyncrl.engines.cluster.reaping import reaper, reaper_process
from asyncrl.errors import ServerFailed

DRIVER = """
import os, subprocess, sys, time
from asyncrl.engines.cluster.reaping.reaper_process import reaped

def start(*words):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(["sleep", "100", *words], start_new_session=True, **quiet)

ORPHAN = ["sh", "-c", "sleep 101 >/dev/null 2>&1 & echo $!"]
other = start()
with reaped(lambda: [spared.pid]) as reaper:
    # A process whose parent has ended, which only its environment shows to be of this session.
    orphan = subprocess.run(ORPHAN, stdout=subprocess.PIPE, text=True, check=True)
    child, spared = start(), start()
    reaper.tell({"GCS": child.pid})
    print(other.pid, orphan.stdout.strip(), child.pid, spared.pid, reaper.pid, flush=True)
    exec(input())
"""

HIDING = (
    DRIVER.replace("& echo $!", "& echo $!; wait")
    .replace("sleep 101", "env -i sleep 101")
    .replace(
        "subprocess.run(ORPHAN, stdout=subprocess.PIPE, text=True, check=True)",
        "subprocess.Popen(ORPHAN, stdout=subprocess.PIPE, text=True)",
    )
    .replace("orphan.stdout.strip()", "orphan.stdout.readline().strip()")
)
"""The orphan has a parent, and no environment."""

AGENTS = (
    DRIVER.replace("other = start()", "other = agent(f'{os.getpid()}1')")
    .replace("subprocess.run(ORPHAN, stdout=subprocess.PIPE, text=True, check=True)", "agent(os.getpid())")
    .replace("other.pid, orphan.stdout.strip()", "other, orphan")
    .replace(
        "ORPHAN =",
        """
def agent(number):
    logs = f"FOLDER/session_2026-11-28_{number}/logs"
    os.makedirs(logs)
    start = f"exec 5>{logs}/raylet.out; env -i bash -c 'exec -a ray::Agent sleep 101' >/dev/null 2>&1 & echo $!"
    return subprocess.run(["sh", "-c", start], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

ORPHAN =""",
    )
)
"""The first process and the orphan are agents of Ray without a parent or an environment."""


WITHOUT_PIDFD = """
import tempfile
from asyncrl.engines.cluster.reaping import reaper_process
with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
    file.write(f'''
import errno, os, runpy
def refused(pid):
    raise OSError(errno.ENOSYS, "not here")
os.pidfd_open = refused
runpy.run_path({reaper_process.PROGRAM!r}, run_name="__main__")
os.unlink(__file__)
''')
reaper_process.PROGRAM = file.name
"""
"""Has the session start a reaper for which the kernel refuses descriptors of processes."""


@contextmanager
def driver(before: str = "", program: str = DRIVER) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A driver that runs the line it reads, and its processes: of no session, orphan, child, spared, reaper."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", before + program], text=True, **pipes) as running:  # type: ignore[call-overload]
        processes = [psutil.Process(int(word)) for word in running.stdout.readline().split()]
        try:
            yield running, processes
        finally:
            running.kill()
            for process in processes:
                if process.is_running():
                    process.kill()


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + 15.0
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, processes))


def test_the_processes_of_a_killed_driver_end_and_no_others() -> None:
    with driver() as (program, (other, orphan, child, spared, reaper)):
        program.kill()
        assert end([orphan, child, spared, reaper]), "what a killed driver would have spared is not known"
        assert is_running(other)
        assert program.stderr is not None
        line = f"error: the program (process {program.pid}) was killed; its processes are ended now\n"
        assert program.stderr.read() == line


def test_a_killed_driver_is_not_put_down_to_the_processes_that_it_takes_along() -> None:
    with driver() as (program, (_, _, child, _, reaper)):
        child.kill()
        time.sleep(0.3)
        program.kill()
        assert end([reaper])
        assert program.stderr is not None
        assert program.stderr.read().startswith(f"error: the program (process {program.pid}) was killed")


def test_a_process_without_the_mark_ends_with_its_parent_that_has_it() -> None:
    """Ray's agents overwrite their environment, and a driver may be killed before any look at its descendants."""
    with driver(program=HIDING) as (program, (other, hidden, child, _, reaper)):
        program.kill()
        assert end([hidden, child, reaper])
        assert is_running(other)


def test_an_agent_of_ray_is_known_by_its_log_once_its_parent_has_ended(tmp_path: Path) -> None:
    """The kernel kills the raylet with the driver, and leaves its agents, which have overwritten their environment."""
    with driver(program=AGENTS.replace("FOLDER", str(tmp_path))) as (program, (stranger, agent, child, _, reaper)):
        program.kill()
        assert end([agent, child, reaper])
        assert is_running(stranger), "an agent of another session"


def test_an_end_in_order_leaves_no_orphan_and_spares_what_ends_by_itself() -> None:
    with driver() as (program, (other, orphan, child, spared, reaper)):
        _, errors = program.communicate("pass\n", timeout=45.0)
        assert (program.returncode, errors) == (0, "")
        assert not any(map(is_running, [orphan, child, reaper]))
        assert is_running(other)
        assert is_running(spared)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_reaper_outlives_signals(number: signal.Signals) -> None:
    with driver() as (program, (_, orphan, _, _, reaper)):
        reaper.send_signal(number)
        program.kill()
        assert end([orphan, reaper])


def test_an_end_at_once_leaves_the_reaper_and_what_is_not_below_the_program() -> None:
    with driver() as (program, (other, orphan, child, spared, reaper)):
        line = "from asyncrl.app.ending.leaving import end_now; end_now(3, 'at once')\n"
        _, errors = program.communicate(line, timeout=60.0)
        assert program.returncode == 3
        assert end([other, child, spared, orphan, reaper])
        gone = f"error: the program (process {program.pid}) ended without its clean-up; its processes are ended now\n"
        assert errors == f"at once\n{gone}"


def test_an_end_at_once_that_leaves_nothing_has_no_second_line() -> None:
    with driver() as (program, (_, orphan, _, _, reaper)):
        orphan.kill()
        line = "from asyncrl.app.ending.leaving import end_now; end_now(3, 'at once')\n"
        assert program.communicate(line, timeout=60.0)[1] == "at once\n"
        assert end([reaper])


def test_an_end_without_a_word_has_a_line_although_nothing_is_left() -> None:
    silent = DRIVER.replace('reaper.tell({"GCS": child.pid})', "pass")
    with driver(program=silent) as (program, (_, orphan, child, spared, reaper)):
        for process in (orphan, child, spared):
            process.kill()
        _, errors = program.communicate("child.wait(); spared.wait(); os._exit(1)\n", timeout=60.0)
        assert "ended without its clean-up; its processes are ended now" in errors
        assert end([reaper])


def test_a_container_without_pidfd_leaves_no_process_either() -> None:
    with driver(WITHOUT_PIDFD) as (program, (other, orphan, child, _, reaper)):
        program.kill()
        assert end([orphan, child, reaper])
        assert is_running(other)


def test_an_end_in_order_needs_no_pidfd() -> None:
    with driver(WITHOUT_PIDFD) as (program, (_, orphan, child, spared, reaper)):
        time.sleep(1.2)  # some looks at the driver
        assert is_running(reaper)
        _, errors = program.communicate("pass\n", timeout=45.0)
        assert (program.returncode, errors) == (0, "")
        assert not any(map(is_running, [orphan, child, reaper]))
        assert is_running(spared)


def test_the_line_names_the_process_of_ray_that_ended_first() -> None:
    with driver() as (program, (_, _, child, _, reaper)):
        _, errors = program.communicate("child.kill(); child.wait(); time.sleep(0.5); os._exit(1)\n", timeout=60.0)
        assert errors.startswith(f"error: Ray's GCS (process {child.pid}) ended, and Ray ended the program")
        assert end([reaper])


LEFT_BY_ITS_MAIN_THREAD = (
    "import ctypes, threading; "
    "last = lambda: (time.sleep(0.3), child.kill(), child.wait(), time.sleep(0.5), os._exit(1)); "
    "threading.Thread(target=last).start(); ctypes.CDLL(None).pthread_exit(None)\n"
)
"""Code that does as a killed program whose last thread waits for a disk: what it takes along ends before it."""


def test_what_a_program_takes_along_is_not_its_cause_however_long_its_last_thread_takes() -> None:
    with driver() as (program, (_, _, _, _, reaper)):
        _, errors = program.communicate(LEFT_BY_ITS_MAIN_THREAD, timeout=60.0)
        assert errors.startswith(f"error: the program (process {program.pid}) ended without its clean-up")
        assert end([reaper])


def test_a_reaper_that_does_not_start_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(100)")
    monkeypatch.setattr(reaper_process, "PROGRAM", str(tmp_path / "hangs.py"))
    monkeypatch.setattr(reaper_process, "START_S", 0.1)
    with pytest.raises(ServerFailed, match="did not start within"), reaper_process.reaped(frozenset):
        raise AssertionError("the session must not begin")


KILLED = """
import os, signal, time
from asyncrl.engines.cluster.session import ray_session
with ray_session(1, hold_signals=lambda: None):
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_of_ray_outlives_a_killed_driver() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED]) as program:
        assert program.wait(timeout=120.0) == -signal.SIGKILL
    (folder,) = session_folder().glob(f"session_*_{program.pid}")
    deadline = time.monotonic() + 15.0
    while (left := writers(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def writers(folder: Path) -> list[str]:
    """The command lines of the processes that have a file in the folder open."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                found.append(" ".join(process.cmdline()))
    return found


def test_processes_are_remembered_until_they_end() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        assert reaper.running({process.pid: start}) == {process.pid: start}
        assert reaper.running({process.pid: start + 1}) == {}
        process.kill()
        process.wait()
        assert reaper.running({process.pid: start}) == {}
