"""The reaper of a session: a process that ends every process of a run once the driver has ended, however it ended.

    driver, alive     the reaper waits for the driver's end, or for the line "over"
    driver, ended     without "over": the reaper prints one error line, and ends every process with the session's mark

The mark is an environment variable whose value only this session has.  A process inherits it, so it is found after its
parent has died.  Ray's agents would run for a minute after the driver was killed.  They overwrite their environment, so
they are also known by their logs, in a folder that Ray names after the driver.

This file is a program for ``python -P -S -E``: it imports nothing but the standard library, and starts in 20 ms.
"""

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Collection, Mapping

READY = b"ready\n"
"""Line that the reaper writes once it ignores signals and knows the processes from before the session."""
OVER = "over"
"""Line that the driver writes at an orderly end."""
PART = "part"
"""First word of a line with a name and a process id, of a process without which Ray ends the driver."""
AT_ONCE = "at-once"
"""Line that the driver writes before it kills its processes and ends at once.  It has said why."""
SPARE = "spare"
"""First word of a line with the id of a process that ends by itself."""
GRACE_S = 3.0
"""Seconds for processes to end by themselves after the driver; most notice its end within two."""
LIMIT_S = 12.0
"""Seconds after which the reaper gives up: a process that takes longer to be killed is stuck in a driver."""
LOOK_EVERY_S = 0.1
REMEMBER_EVERY_MS = 2000
"""Milliseconds between two looks at the driver's descendants.  A process may overwrite its environment."""
EMPTY_LOOKS = 3
"""Looks in a row without a process after which none is left.  Between fork and exec, a process may escape a look."""
LOOK_EVERY_MS = 500
"""Milliseconds between two looks at the driver itself, where the kernel does not report its end."""
BEFORE_S = 0.05
"""Seconds by which a part must end before the driver to be its cause.

A killed driver takes its parts along: the kernel kills them when the driver's main thread ends.  Its last thread ends
some milliseconds later, or longer if it waits for a disk.
"""
SPARED = (b"asyncrl.metrics.trackers", b"multiprocessing.resource_tracker")
"""Parts of command lines of processes that end by themselves: trackers still send rows, Python's resource tracker frees
shared memory.  Their descendants are spared too."""


def main(driver: int, mark: str) -> None:
    """Wait for the end of ``driver`` and end the processes that have ``mark``, "NAME=VALUE", in their environment."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = _Watch(driver)
    os.write(1, READY)
    is_over = watch.wait()
    session = _Session(driver, mark)
    if not is_over and (line := watch.why(bool(_found(session, set(watch.spared), watch.known)))):
        _say(line)
    end(session, grace_s=0.0 if is_over else GRACE_S, spared=watch.spared, known=watch.known)


class _Session:
    """The signs of a process of the session."""

    def __init__(self, driver: int, mark: str) -> None:
        self._mark = mark.encode()
        self._log = re.compile(rf"/session_[^/]*_{driver}/logs/")

    def has(self, pid: int, known: Mapping[int, int]) -> bool:
        """Whether a process has the mark or a log of the session, or is known by its id and start time."""
        if self._mark in _read(pid, "environ").split(b"\0") or _stat(pid)[2] == known.get(pid):
            return True
        return _read(pid, "cmdline").startswith(b"ray::") and any(map(self._log.search, _open_files(pid)))


class _Watch:
    """The wait for the driver's end."""

    def __init__(self, driver: int) -> None:
        self.spared = set[int]()
        self._driver = driver
        self._started = _start(driver)
        self._others = _below(driver)
        """Descendants of the driver from before the session."""
        self.known = dict[int, int]()
        """The start times of the driver's descendants, by their ids."""
        self._parts = dict[int, str]()
        """Names of the parts by the descriptors (pidfd) that become readable when they end."""
        self._ended: list[tuple[float, str]] = []
        """Times and names of the parts that have ended."""
        self._has_said = False
        """Whether the driver has announced its end at once."""
        self._over_at = 0.0
        """The time at which the driver's end was noticed."""
        self._waiting = select.poll()
        self._waiting.register(0, select.POLLIN)

    def wait(self) -> bool:
        """Return once the driver has ended or is over, and whether it is over."""
        ended = _opened(self._driver)
        if ended is not None:
            self._waiting.register(ended, select.POLLIN)
        text = b""
        while True:
            ready = {number for number, _ in self._waiting.poll(LOOK_EVERY_MS if ended is None else REMEMBER_EVERY_MS)}
            if not ready:
                # A process whose parent has died is no longer below the driver.
                self.known = running(self.known) | dict(_below(self._driver).items() - self._others.items())
            has_ended = ended in ready if ended is not None else _start(self._driver) != self._started
            if (has_ended or self._started is None) and 0 not in ready:
                # Before any look at other processes, which may take longer than BEFORE_S.
                self._over_at = time.monotonic()
                return False
            if 0 in ready:
                got = os.read(0, 65_536)
                if not got:  # closed without a line: the driver is ending
                    self._waiting.unregister(0)
                *lines, text = (text + got).split(b"\n")
                if any(self._is_over(line.decode()) for line in lines):
                    return True
            for number in ready & self._parts.keys():
                part = self._parts.pop(number)
                self._waiting.unregister(number)
                if _start(self._driver) is not None:  # or its main thread has ended, and took the part along
                    self._ended.append((time.monotonic(), part))

    def why(self, has_left: bool) -> str | None:
        """Return a line on the end of the driver, which ``has_left`` processes; None if there is nothing to say."""
        status = _status(self._driver)
        is_killed = status is not None and status & 0x7F == signal.SIGKILL  # as waitpid(2) returns it
        gone = " and ".join(name for at, name in self._ended if self._over_at - at >= BEFORE_S)
        program = f"the program (process {self._driver})"
        if gone and not is_killed and not self._has_said:
            return f"error: {gone} ended, and Ray ended {program} with it"
        if self._has_said and not has_left:
            return None
        how = "was killed" if is_killed else "ended without its clean-up"
        return f"error: {program} {how}; its processes are ended now"

    def _is_over(self, line: str) -> bool:
        """Take in a line of the driver; return whether it is the last one."""
        word, *more = line.split()
        self._has_said |= word == AT_ONCE
        if word == SPARE:
            self.spared.add(int(more[0]))
        if word == PART:
            name, pid = more
            part = f"Ray's {name} (process {pid})"
            number = _opened(int(pid))
            if number is not None:
                self._parts[number] = part
                self._waiting.register(number, select.POLLIN)
            elif _start(int(pid)) is None:
                self._ended.append((time.monotonic(), part))
        return word == OVER


def running(known: dict[int, int]) -> dict[int, int]:
    """Return the processes, start times by ids, that still run; a later process with the same id is another one."""
    return {pid: start for pid, start in known.items() if _start(pid) == start}


def _opened(pid: int) -> int | None:
    """Return a descriptor of the process; None if it is gone, or in containers that do not allow or know the call."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _start(pid: int) -> int | None:
    """Return the start time of a process that runs; None if it has ended."""
    try:
        state, _, start = _stat(pid)
    except (OSError, IndexError, ValueError):
        return None
    return None if state in b"ZX" else start


def _status(pid: int) -> int | None:
    """Return how the process ended; None if its parent has taken the status already."""
    try:
        return int(_read(pid, "stat").split()[-1])
    except (OSError, IndexError, ValueError):
        return None


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, f"{line}\n".encode())


def end(session: _Session, *, grace_s: float, spared: Collection[int], known: Mapping[int, int]) -> None:
    """End the processes of the session and all below them, but for the spared ones and all below those.

    They are killed after ``grace_s`` seconds, and so are processes that others start meanwhile.
    """
    began, num_empty, known = time.monotonic(), 0, dict(known)
    while num_empty < EMPTY_LOOKS and (passed := time.monotonic() - began) < LIMIT_S:
        found = _found(session, set(spared), known)
        known |= found  # once their parents have ended, nothing else shows that these are of the session
        num_empty = 0 if found else num_empty + 1
        if passed >= grace_s:
            for pid in found:
                _kill(pid, session, known)
        if num_empty < EMPTY_LOOKS:
            time.sleep(LOOK_EVERY_S)
    if num_empty == 0:
        _say(f"error: {len(found)} processes of the program did not end within {LIMIT_S:g} s: {sorted(found)}")


def _found(session: _Session, spared: set[int], known: Mapping[int, int]) -> dict[int, int]:
    """Return the running processes of the session and all below them: their start times by ids.

    This process and the spared ones are left out.
    """
    own, parents, starts, ours = os.getpid(), dict[int, int](), dict[int, int](), set[int]()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or (pid := int(name)) == own:
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended, or is of another user
            state, parents[pid], start = _stat(pid)
            if state != b"Z":
                starts[pid] = start
                if session.has(pid, known):
                    ours.add(pid)
    found = [pid for pid in starts if _is_below(pid, ours, parents)]
    for pid in found:
        with contextlib.suppress(OSError):
            if any(word in _read(pid, "cmdline") for word in SPARED):
                spared.add(pid)
    return {pid: starts[pid] for pid in found if not _is_below(pid, spared, parents)}


def _is_below(pid: int, spared: set[int], parents: dict[int, int]) -> bool:
    """Whether ``pid`` or one of its ancestors is spared."""
    for _ in range(len(parents) + 1):  # a process id that is used again could close a ring
        if pid in spared:
            return True
        if pid not in parents:
            return False
        pid = parents[pid]
    return False


def _below(root: int) -> dict[int, int]:
    """Return the start times of the descendants of a process, by their ids; without this process."""
    parents, starts = dict[int, int](), dict[int, int]()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            pid = int(name)
            _, parents[pid], starts[pid] = _stat(pid)
    return {pid: starts[pid] for pid in starts if pid not in (root, os.getpid()) and _is_below(pid, {root}, parents)}


def _kill(pid: int, session: _Session, known: Mapping[int, int]) -> None:
    """Kill a process if it is still of the session; a process id may be used again at any time."""
    with contextlib.suppress(OSError):
        handle = _opened(pid)  # without it, a process may end between the look and the signal
        try:
            if session.has(pid, known):
                os.kill(pid, signal.SIGKILL) if handle is None else signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            if handle is not None:
                os.close(handle)


def _open_files(pid: int) -> list[str]:
    """Return the targets of a process's open descriptors; empty if the process has ended."""
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def _stat(pid: int) -> tuple[bytes, int, int]:
    """Return the state, the parent and the start time of a process."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # the name before may contain anything
    return fields[0], int(fields[1]), int(fields[19])


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
