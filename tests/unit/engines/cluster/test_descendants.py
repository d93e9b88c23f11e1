"""The processes that a session ends with the run."""

import subprocess
import sys
import warnings
from multiprocessing import resource_tracker

import psutil

from asyncrl.engines.cluster import session


def test_the_resource_tracker_is_left_to_end_by_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an earlier test of this process may have ended its tracker
        resource_tracker.ensure_running()
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    trackers = [child for child in children if "resource_tracker" in " ".join(child.cmdline())]
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = session._descendants()  # noqa: SLF001
    finally:
        other.communicate(b"\n")
    assert len(trackers) == 1
    assert trackers[0] not in found
    assert other.pid in [process.pid for process in found]
