"""The verdict on a run that lost an engine; the run itself takes GPUs, or minutes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.endless_run import GROUP_FATES, TOKEN_FATES
from benchmarks.lost_engine import dies_in_update
from benchmarks.lost_engine.__main__ import found

LOAD = """
from importlib.metadata import entry_points
entry_points(group="sglang.srt.plugins")["asyncrl_dies_in_update"].load()()
"""
TWICE = {
    "update": f"""
import torch.distributed as dist
dist.broadcast = lambda number: print("received", number, flush=True)
{LOAD}
dist.broadcast(1)
input()
dist.broadcast(2)
""",
    "pause": f"""
import sys, types
for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
    sys.modules[name] = types.ModuleType(name)
hooks = {{}}
registry = sys.modules["sglang.srt.plugins.hook_registry"]
registry.HookType = types.SimpleNamespace(BEFORE="before")
registry.HookRegistry = types.SimpleNamespace(register=lambda target, hook, kind: hooks.update({{target: hook}}))
{LOAD}
pause = hooks["sglang.srt.managers.scheduler.Scheduler.pause_generation"]
pause(None, "in_place")
print("received", 1, flush=True)
input()
pause(None, "in_place")
print("received", 2, flush=True)
""",
}
"""Programs that call the hook twice, as SGLang does after it has loaded its plug-ins; they wait in between."""
URLS = {"http://a": "9", "http://b": "9"}


def rows(**last: Any) -> list[dict[str, Any]]:
    """Nine steps in which everything holds, except for the values ``last`` of the last step."""
    steps = []
    for step in range(9):
        trained = 100 * (step + 1)
        steps.append(
            {f"tokens/{fate}": 0 for fate in TOKEN_FATES}
            | {f"groups/{fate}": 0 for fate in GROUP_FATES}
            | {"tokens/generated": trained + 7, "tokens/trained": trained, "tokens/held": 7}
            | {"groups/admitted": 4 * step + 8, "groups/trained": 4 * step + 4, "groups/in_flight": 4}
            | {"step": step, "version": step, "time/step_s": 1.0, "lag/max": 2, "retries": 3}
            | {"train/logprob_diff": 1e-3}
        )
    steps[-1] |= last
    return steps


def test_a_run_that_lost_nothing_holds() -> None:
    told = found(rows(), 3, 6, URLS)
    assert told["holds"]
    assert told["s per step while it was away (3 steps)"] == 1.0
    assert told["groups admitted / accounted for"] == "40 / 40"


@pytest.mark.parametrize(
    "last",
    [{"groups/in_flight": 3}, {"tokens/held": 6}, {"groups/failed": 1, "groups/in_flight": 3}, {"step": 9}],
    ids=["a prompt is lost", "a token is lost", "a group failed", "a step is missing"],
)
def test_a_run_that_lost_something_does_not(last: dict[str, Any]) -> None:
    assert not found(rows(**last), 3, 6, URLS)["holds"]


def test_an_engine_with_old_weights_does_not_hold() -> None:
    assert not found(rows(), 3, 6, {"http://a": "9", "http://b": "4"})["holds"]
    assert not found(rows(version=10), 3, 6, URLS)["holds"]


@pytest.mark.parametrize("moment", TWICE)
def test_a_server_dies_once_it_is_told_to_and_its_moment_comes(tmp_path: Path, moment: dies_in_update.Moment) -> None:
    armed = tmp_path / "armed"
    environment = dies_in_update.environment(tmp_path / "plugin", armed, moment)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TWICE[moment]],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin and server.stdout
        first = server.stdout.readline()
        armed.touch()
        rest, _ = server.communicate("continue\n", timeout=90.0)
    assert (first, rest, server.returncode) == ("received 1\n", "", -signal.SIGKILL)
    assert not armed.exists()
