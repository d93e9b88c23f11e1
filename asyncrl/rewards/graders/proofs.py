"""Proofs of equality by ``math-verify``, which are limited in time in every thread.

math-verify ends a computation of sympy with ``signal.alarm``.  Only the main thread may do that, and nothing else ends
a computation in a thread.  So:

    main thread      the proof runs here
    other threads    one helper process per process proves for all of them, on its own main thread, one pair at a time

consumes      pairs of LaTeX expressions
produces      True or False
waits for     the proofs of other threads; the helper, at most MOST_S
on failure    a late proof is False, and its helper is killed; a helper that cannot start, or dies, raises RewardFailed
on exit       the helper is killed; if its process is killed, it ends with its proof, after MOST_S of CPU time at most
"""

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from asyncrl.errors import RewardFailed

LIMIT_S = 5
"""Seconds that math-verify may take to read one expression, and to compare two.  An answer beyond that is wrong."""
MOST_S = 4 * LIMIT_S
"""Seconds of a proof in the helper, at most: two readings, a comparison, and as much again."""
START_S = 60.0
"""Seconds in which the helper must have started; the import of sympy takes 1.5 s."""

_READY, _YES, _NO = b"r", b"y", b"n"
_COMMAND = f"from {__name__} import serve; serve()"


def is_proven(given: str, wanted: str) -> bool:
    """Return whether math-verify reads both LaTeX expressions and finds them equal, within LIMIT_S each.

    Off the main thread, raises RewardFailed if the helper process cannot start or dies.
    """
    if threading.current_thread() is threading.main_thread():
        return _is_proven_here(given, wanted)
    return HELPER.is_proven(given, wanted)


def serve() -> None:
    """Prove what another process asks, until it ends.  The main function of the helper."""
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not be taken for a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, which ends the helper
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})  # a thread may have blocked them
    import math_verify  # noqa: F401 (here, so that no proof waits for it)

    with suppress(BrokenPipeError):
        os.write(replies, _READY)
        for line in sys.stdin.buffer:
            given, wanted = json.loads(line)
            # The kernel ends this process with the default action of SIGPROF, also in a C loop.  No Python code of
            # this process could do so, and after the caller's death there may be no other process that would.
            signal.setitimer(signal.ITIMER_PROF, MOST_S)
            reply = _YES if _is_proven_here(given, wanted) else _NO
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.write(replies, reply)


def _is_proven_here(given: str, wanted: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify  # imports sympy: 1.5 s

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # a late or unreadable answer is wrong, not a warning
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    read = [
        parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=LIMIT_S) for text in (wanted, given)
    ]
    return all(read) and verify(*read, timeout_seconds=LIMIT_S)


class Helper:
    """The helper of this process.  It starts with the first proof, and again after it was killed.

    Invariant: only the thread that holds ``_lock`` writes to the helper or reads from it.  Otherwise a thread would
    read the reply of another thread's proof.  Pipes without a buffer hold no lock that a fork could copy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def is_proven(self, given: str, wanted: str) -> bool:
        """Return whether the helper proves the pair.  Raises RewardFailed if it cannot start or dies."""
        with self._lock:
            is_done = False
            try:
                process = self._running()
                _send(process, json.dumps([given, wanted]))
                reply = _reply(process, MOST_S)
                is_done = reply in (_YES, _NO)
            finally:
                code = None if is_done else self.end()
        if is_done or reply is None or code == -signal.SIGPROF:
            return reply == _YES
        raise RewardFailed(f"the process that compares answers for threads died (exit code {code})")

    def end(self) -> int | None:
        """Kill the helper and return its exit code; None without one."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with process:  # closes the pipes and waits
            pass
        return process.returncode

    def forget(self) -> None:
        """Leave the helper to the parent.  Runs in a child after a fork, in its only thread."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()  # with it open, the helper would not end with the parent
            process.stdout.close()
            process.returncode = 0  # only the parent can wait for it

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the helper, started if there is none.  Raises RewardFailed."""
        if self._process is not None and self._process.poll() is not None:  # killed while it was idle
            self.end()
        if self._process is None:
            self._process = _started()
            if _reply(self._process, START_S) != _READY:
                code = self.end()
                raise RewardFailed(
                    f"the process that compares answers for threads did not start within {START_S:g} s "
                    f"(exit code {code})"
                )
        return self._process


def _started() -> "subprocess.Popen[bytes]":
    """Start the helper with the import path of this process.  Raises RewardFailed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", _COMMAND]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment)
    except OSError as error:
        raise RewardFailed(f"the process that compares answers for threads cannot start: {error}") from error


def _send(process: "subprocess.Popen[bytes]", text: str) -> None:
    """Write a line of a few kB at most, which a pipe takes at once.  A dead helper shows in the reply."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(text.encode() + b"\n")


def _reply(process: "subprocess.Popen[bytes]", seconds: float) -> bytes | None:
    """Return one byte of the helper, or no byte if it has ended; None if it is late."""
    assert process.stdout is not None
    waiting = select.poll()
    waiting.register(process.stdout, select.POLLIN)
    return process.stdout.read(1) if waiting.poll(1000 * seconds) else None


HELPER = Helper()
"""The helper of this process."""
os.register_at_fork(after_in_child=HELPER.forget)
atexit.register(HELPER.end)
