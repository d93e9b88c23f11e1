"""The processes of a session end with it, however it ends.

A stand-in replaces Ray, so no cluster is needed.
"""

import signal
import subprocess
import sys

import psutil
import pytest

PROGRAM = """
import asyncio, atexit, logging, os, signal, subprocess, sys, time, types, uvloop
from asyncrl.engines.cluster import session
ray = types.ModuleType("ray")
def set_sigterm_handler(handler):
    signal.signal(signal.SIGTERM, handler)
def init(**options):
    ray._private.utils.set_sigterm_handler(lambda number, frame: sys.exit(number))  # as Ray does, first thing
    print(subprocess.Popen(["sleep", "100"]).pid, flush=True)
    during_init()
def shutdown():
    if sys.modules.pop("ray", None):
        during_shutdown()
        sys.modules["ended"] = None
    elif "ended" not in sys.modules:
        time.sleep(100)  # as Ray does, for the one that does not end
atexit.register(shutdown)
ray.init, ray.shutdown = init, shutdown
ray._private = types.SimpleNamespace(
    utils=types.SimpleNamespace(set_sigterm_handler=set_sigterm_handler),
    ray_constants=types.SimpleNamespace(ENABLE_RAY_CLUSTER=True),
    services=types.SimpleNamespace(get_node=lambda address, node_id: next(answers)(node_id)),
    node=types.SimpleNamespace(Node=types.SimpleNamespace(**dict.fromkeys(session.EXTRAS, print))),
)
sys.modules["ray"] = ray
kill = lambda: os.kill(os.getpid(), signal.SIGTERM)
during_init = during_shutdown = lambda: None
spared = []
{setting}
{internals}
from asyncrl.engines.cluster.session import ray_session
from asyncrl.app.signals import Signals
async def run():
    with signals.cancelling():
        await asyncio.sleep(0)
        {body}
        await asyncio.sleep(0.1)
with Signals.caught() as signals:
    {before}
    signals.remember()
    try:
        with ray_session(1, hold_signals=signals.hold, spared=lambda: spared):
            asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run())
    except BaseException as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(signals.exit_code if signals.received else 1)
    sys.exit(signals.exit_code if signals.received else 0)
"""


UNCHECKED = "session.INTERNALS = session.CALLS = session.PLACEMENT = ()"
"""Code that switches off the check of Ray's names, most of which the stand-in lacks."""


def run(
    setting: str = "", body: str = "pass", before: str = "pass", internals: str = UNCHECKED
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("{setting}", setting).replace("{body}", body).replace("{before}", before)
    program = program.replace("{internals}", internals)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False)


LOCKED = "logging._acquireLock(); kill(); logging._releaseLock()"
"""Code that sends a signal while a lock is held, as when a module with a logger is imported."""


@pytest.mark.parametrize(
    ("setting", "body", "code"),
    [
        ("", "pass", 0),
        ("", "kill()", 143),
        ("", "kill(); await asyncio.sleep(100)", 143),
        ("", "os.kill(os.getpid(), signal.SIGINT)", 130),
        ("", "raise KeyError('bug')", 1),
        ("during_shutdown = lambda: time.sleep(100)", "session.SHUTDOWN_S = 0.3", 0),
        ("during_shutdown = kill", "pass", 143),
        ("during_shutdown = kill", "kill()", 143),
        ("during_init = kill", "raise AssertionError('cancelled before')", 143),
        ("during_init = during_shutdown = kill", "pass", 143),
        (f"def during_init(): {LOCKED}", "pass", 143),
        ("def during_init(): raise ConnectionError('no GCS')", "pass", 1),
    ],
)
def test_no_process_is_left_and_the_exit_code_says_why(setting: str, body: str, code: int) -> None:
    done = run(setting, body)
    assert done.returncode == code, done.stderr
    assert "AssertionError" not in done.stderr
    assert not psutil.pid_exists(int(done.stdout.split()[0]))


def test_before_anything_is_started_a_signal_ends_the_program_at_once() -> None:
    done = run(before=LOCKED)
    assert done.returncode == 143, done.stderr
    assert done.stdout == ""


def test_a_cluster_that_does_not_start_is_one_line() -> None:
    done = run("def during_init(): raise Exception('timed out\\nmore')")
    assert done.stderr.strip() == "error: ServerFailed: Ray did not start: timed out"


NOT_YET = """
def not_yet(node_id): raise RuntimeError(f"no node {node_id}")
def during_init(): print(ray._private.services.get_node("address", "seven"))
answers = iter([not_yet] * 3 + [lambda node_id: f"found {node_id}"] + [not_yet] * 1000)
"""
"""Code that asks for a node when Ray starts, which is there at the fourth look."""


def test_ray_is_waited_for_longer_than_ray_does() -> None:
    done = run(NOT_YET)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["found seven"]), done.stderr


def test_a_node_that_never_comes_ends_the_start_in_time() -> None:
    done = run(f"{NOT_YET}\nfor _ in range(4): next(answers)", internals=f"{UNCHECKED}\nsession.START_S = 0.3")
    assert done.stderr.strip() == "error: ServerFailed: Ray did not start: no node seven"


def test_signals_that_follow_the_first_change_nothing() -> None:
    done = run("during_shutdown = lambda: [kill() for _ in range(5)]", "os.kill(os.getpid(), signal.SIGINT)")
    assert done.returncode == 128 + signal.SIGINT


def test_an_unexpected_ray_is_refused_in_one_line_and_nothing_is_started() -> None:
    done = run(internals="")
    assert done.returncode == 1
    assert done.stdout == ""
    line = done.stderr.strip()
    assert line.startswith("error: InternalsChanged: ray._private.utils.set_sigterm_handler takes (handler), not (sig")
    assert "\n" not in line


PARENT = "import subprocess, time; print(subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
"""A program with a child process."""


def test_spared_processes_and_their_children_outlive_the_session() -> None:
    pipes = "stdout=subprocess.PIPE, stderr=subprocess.DEVNULL"
    start = f"child = subprocess.Popen([sys.executable, '-c', {PARENT!r}], {pipes})"
    done = run(body=f"{start}; spared.append(child.pid); print(child.pid, int(child.stdout.readline()), flush=True)")
    ray, *pids = [psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else None for pid in done.stdout.split()]
    for process in filter(None, pids):
        process.kill()
    assert done.returncode == 0, done.stderr
    assert ray is None
    assert len(pids) == 2
    assert None not in pids
