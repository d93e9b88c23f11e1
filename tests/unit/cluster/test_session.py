"""Whatever happens while a session ends, its processes end with it.  With a stand-in for Ray: no cluster is needed."""

import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

PROGRAM = """
import os, signal, subprocess, sys, time, types
ray = types.ModuleType("ray")
def init(**options):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does, first thing
    print(subprocess.Popen(["sleep", "100"]).pid, flush=True)
    during_init()
def shutdown():
    during_shutdown()
ray.init, ray.shutdown = init, shutdown
sys.modules["ray"] = ray
kill = lambda: os.kill(os.getpid(), signal.SIGTERM)
during_init = during_shutdown = lambda: None
{setting}
from asyncrl.engines.cluster import session
from asyncrl.engines.cluster.session import ray_session
from asyncrl.signals import Signals
with Signals.caught() as signals:
    try:
        with ray_session(1, hold_signals=signals.only_remember):
            signals.catch()
            {body}
    except BaseException as error:
        by_ray = isinstance(error, SystemExit) and error.code == signal.SIGTERM
        code = signals.exit_code if signals.received else 143 if by_ray else 1
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(code)
    sys.exit(signals.exit_code if signals.received else 0)
"""


@pytest.mark.parametrize(
    ("setting", "body", "code"),
    [
        ("", "pass", 0),
        ("", "kill()", 143),
        ("", "os.kill(os.getpid(), signal.SIGINT)", 130),
        ("", "raise KeyError('bug')", 1),
        ("during_shutdown = lambda: time.sleep(100)", "session.SHUTDOWN_S = 0.3", 0),
        ("during_shutdown = kill", "pass", 143),
        ("during_shutdown = kill", "kill()", 143),
        ("during_init = kill", "pass", 143),
        ("during_init = during_shutdown = kill", "pass", 143),
        ("def during_init():\n    try: kill()\n    except SystemExit: pass  # as in a destructor", "pass", 143),
        ("def during_init(): raise ConnectionError('no GCS')", "pass", 1),
    ],
)
def test_no_process_is_left_and_the_exit_code_says_why(setting: str, body: str, code: int) -> None:
    program = textwrap.dedent(PROGRAM).replace("{setting}", setting).replace("{body}", body)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code, done.stderr
    assert not psutil.pid_exists(int(done.stdout.split()[0]))


def test_a_cluster_that_does_not_start_is_one_line() -> None:
    program = textwrap.dedent(PROGRAM).replace("{setting}", "def during_init(): raise Exception('timed out\\nmore')")
    command = [sys.executable, "-c", program.replace("{body}", "pass")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr.strip() == "error: ServerFailed: Ray did not start: timed out"


def test_signals_that_follow_the_first_change_nothing() -> None:
    program = textwrap.dedent(PROGRAM).replace("{setting}", "during_shutdown = lambda: [kill() for _ in range(5)]")
    command = [sys.executable, "-c", program.replace("{body}", "os.kill(os.getpid(), signal.SIGINT)")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 128 + signal.SIGINT
