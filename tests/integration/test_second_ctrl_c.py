"""A second Ctrl-C ends a real run at once, and leaves no process behind."""

import signal
import time
from pathlib import Path

import pytest

from tests.integration.launcher import QUICKSTART, START_S, Launched

pytestmark = pytest.mark.timeout(1800)

HANGS = """
import time

def hangs(group):
    print("the filter hangs", flush=True)
    while True:
        time.sleep(0.01)
"""


def test_a_second_ctrl_c_kills_every_process_of_a_run_with_a_hung_filter(tmp_path: Path) -> None:
    filters = tmp_path / "filters.py"
    filters.write_text(HANGS)
    hung = ("--dynamic-sampling-filter-path", f"{filters}:hangs", "--num-rollout", "3")
    launched = Launched(tmp_path / "run", [*QUICKSTART, *hung])
    launched.wait_for_output("the filter hangs", START_S)
    launched.send_to_group(signal.SIGINT)
    time.sleep(2.0)  # the orderly end cannot come: the loop is blocked
    began = time.monotonic()
    launched.send_to_group(signal.SIGINT)
    outcome = launched.finish(30.0)
    assert outcome.code == 130, outcome.output
    assert outcome.left == ()
    assert "warning: SIGINT again: the program ends at once" in outcome.output
    assert time.monotonic() - began < 20.0
