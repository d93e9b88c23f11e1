import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.errors import NotNow
from asyncrl.page.child import page_of
from tests.unit.page.made_runs import write_run
from tests.unit.page.serving import opened


def test_a_run_has_a_page_until_it_ends(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with page_of(folder, 0, folder / "logs") as page:
        assert "Overview of run" in opened(page.url)
        words = " ".join(psutil.Process(page.pid).cmdline())
        assert page.url.partition("key=")[2] not in words
    assert not psutil.pid_exists(page.pid)
    assert (folder / "logs" / "page.log").read_text() == ""


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(NotNow, match=f"--page-port {port}: Address already in use"),
            page_of(tmp_path, port, tmp_path),
        ):
            pass


def test_the_page_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    code = (
        "import sys, time; from pathlib import Path; from asyncrl.page.child import page_of\n"
        "folder = Path(sys.argv[1])\n"
        "with page_of(folder, 0, folder) as page: print(page.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        page = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    page.wait(timeout=60)


def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "asyncrl.page", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        url = program.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?key=[\w-]{32}", url)
        assert "Overview of run" in opened(url)
        begun = time.monotonic()
        program.terminate()
        assert program.wait(timeout=60) == 0
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("words", "said"),
    [(["/none"], "error: /none: there is no such folder"), (["--port", "70000"], "error: --port 70000")],
)
def test_wrong_words_are_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    folder = [] if words == ["/none"] else [str(write_run(tmp_path / "run"))]
    command = [sys.executable, "-m", "asyncrl.page", *words, *folder]
    found = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert found.returncode in {1, 2}
    assert found.stderr.startswith(said)
    assert found.stderr.count("\n") == 1
