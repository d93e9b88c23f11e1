"""One run holds a folder.  Real processes, and the real clock, with shorter times."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from asyncrl.engines.megatron.checkpoint import lease
from asyncrl.engines.megatron.checkpoint.lease import Claim, check, release, renew, take
from asyncrl.errors import LeaseLost, NotNow

HOLDER = """
import sys, time
from pathlib import Path
from asyncrl.engines.megatron.checkpoint import held, lease
held.HEARTBEAT_S = 0.1
holder = held.SaveLease(lease.take(Path(sys.argv[1]), say=print))
print(holder.claim.run, flush=True)
sys.stdin.readline()
holder.release()
"""

LONG_S, SOON_S = 60.0, 10.0
"""A time after which claims expire, and a limit for takes that do not wait for it, on a busy disk."""


def quiet(line: str) -> None:
    pass


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lease, "EXPIRES_S", 0.6)
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(lease, "LOOK_EVERY_S", 0.02)
    return tmp_path


@pytest.fixture
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".lease").iterdir())


def on_another_machine(root: Path, token: int) -> None:
    """Change the claim as if its process ran elsewhere."""
    path = root / ".lease" / f"{token:07}.json"
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), "machine": "another", "host": "node7"}))


def test_tokens_increase_and_the_newest_claim_stays(root: Path) -> None:
    for token in (1, 2, 3):
        claim = take(root, quiet)
        check(claim)
        assert claim.token == token
        release(claim)
        assert files(root) == [f"{token:07}.json", f"{token:07}.released"]


def test_a_second_run_is_told_who_holds_the_folder(
    root: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRES_S", LONG_S)
    run, began = line_of(holder), time.monotonic()
    with pytest.raises(NotNow) as error:
        take(root, quiet)
    assert time.monotonic() - began < SOON_S
    assert str(error.value).startswith(f"save {root} is held by run {run} (process {holder.pid} on ")
    assert str(error.value).endswith(": end that run, or give another folder")
    assert ") since 20" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(files(root)) == 1


def test_a_run_resumes_at_once_after_its_own_kill(
    root: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRES_S", LONG_S)
    line_of(holder)
    holder.kill()  # a zombie now: this process has not waited for it
    began = time.monotonic()
    assert take(root, quiet).token == 2
    assert time.monotonic() - began < SOON_S
    holder.wait()


def test_a_run_that_ended_leaves_the_folder_free(
    root: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRES_S", LONG_S)
    line_of(holder)
    on_another_machine(root, 1)
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.wait() == 0
    began = time.monotonic()
    assert take(root, quiet).token == 2
    assert time.monotonic() - began < SOON_S


def test_a_run_on_another_machine_that_is_silent_has_expired(
    root: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line_of(holder)
    on_another_machine(root, 1)
    holder.send_signal(signal.SIGSTOP)
    lines: list[str] = []
    began = time.monotonic()
    claim = take(root, lines.append)
    assert claim.token == 2
    assert 0.6 <= time.monotonic() - began < 20.0
    (line,) = lines
    assert line.startswith(f"save {root}: waiting up to 0.6 s for a sign of run ")
    assert f"(process {holder.pid} on node7)" in line
    holder.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # several heartbeats
    check(claim)


def test_a_stopped_run_on_this_machine_expires_too(root: Path, holder: subprocess.Popen[str]) -> None:
    line_of(holder)
    holder.send_signal(signal.SIGSTOP)
    assert take(root, quiet).token == 2


def test_a_claim_that_was_never_written_expires(root: Path) -> None:
    (root / ".lease").mkdir()
    (root / ".lease" / "0000004.json").touch()
    assert take(root, quiet).token == 5


@pytest.mark.parametrize("look", [check, renew])
def test_a_claim_after_another_is_lost(root: Path, look: object) -> None:
    first = take(root, quiet)
    release(first)
    second = take(root, quiet)
    assert callable(look)
    with pytest.raises(LeaseLost, match=rf"nothing more: it is held by run {second.run} \(process \d+ on .*\) since"):
        look(first)
    look(second)


@pytest.mark.parametrize("look", [check, renew])
def test_a_claim_whose_file_was_removed_is_lost(root: Path, look: object) -> None:
    claim = take(root, quiet)
    claim.path.unlink()
    assert callable(look)
    with pytest.raises(LeaseLost, match="its claim was removed"):
        look(claim)
    (root / ".lease").rmdir()
    with pytest.raises(LeaseLost, match="was removed"):
        look(claim)


def test_two_runs_never_get_the_same_token(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run claims the folder between this run's look and its claim."""
    describe, others = lease._of_this_process, []  # noqa: SLF001

    def describe_late(folder: Path, token: int) -> Claim:
        monkeypatch.setattr(lease, "_of_this_process", describe)
        others.append(take(root, quiet))
        return describe(folder, token)

    monkeypatch.setattr(lease, "_of_this_process", describe_late)
    assert (take(root, quiet).token, others[0].token) == (2, 1)  # the other run gives no heartbeat here


def test_a_run_that_sleeps_right_after_its_claim_does_not_hold_the_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, others = lease._create, []  # noqa: SLF001

    def create_and_sleep(path: Path, content: bytes) -> None:
        create(path, content)
        monkeypatch.setattr(lease, "_create", create)
        others.append(take(root, quiet))

    monkeypatch.setattr(lease, "_create", create_and_sleep)
    assert (take(root, quiet).token, others[0].token) == (3, 2)


def test_of_many_runs_that_start_together_one_gets_the_folder(root: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(root)]
    together = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        ended = wait_for_all_but_one(together)
        errors = [process.communicate()[1] for process in ended]
        assert all("is held by run" in error for error in errors), errors
        (alive,) = (process for process in together if process not in ended)
        assert line_of(alive) in errors[0]
    finally:
        for process in together:
            process.kill()
            process.communicate()


def wait_for_all_but_one(together: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    while len(ended := [process for process in together if process.poll() is not None]) < len(together) - 1:
        time.sleep(0.05)
    return ended
