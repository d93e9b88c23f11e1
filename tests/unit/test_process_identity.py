import os
import shutil
import signal
import subprocess
from pathlib import Path

from asyncrl.process_identity import machine_id, start_of


def test_the_identity_of_a_process_stays_the_same() -> None:
    assert machine_id() == machine_id() is not None
    assert start_of(os.getpid()) == start_of(os.getpid()) is not None


def test_a_process_may_have_any_name_and_has_no_start_once_it_has_ended(tmp_path: Path) -> None:
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "a) Z 1 (b")
    with subprocess.Popen([program, "60"]) as process:
        assert int(start_of(process.pid) or 0) >= int(start_of(os.getpid()) or 0)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the process is a zombie now
        assert start_of(process.pid) is None
    assert start_of(process.pid) is None
