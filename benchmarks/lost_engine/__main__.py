"""A run that loses an engine: its cost, losses of tokens or groups, and the weights that the restarted engine serves.

    uv run python -m benchmarks.lost_engine --trainer-gpus 2 --engine-gpus 2 --model 1.7b                   four GPUs
    uv run python -m benchmarks.lost_engine --kill pause                death of an engine at the start of an update
    uv run python -m benchmarks.lost_engine --kill update               death of an engine within a broadcast
    uv run python -m benchmarks.lost_engine --kill hang                 an engine that stops without dying
    sudo .venv/bin/python -m benchmarks.lost_engine --kill machine --device cpu --model tiny    a machine that vanishes
    uv run python -m benchmarks.lost_engine --device cpu --model tiny --groups 4 --group-size 4 --longest 32

Starts train_async.py as a user would, on random weights and prompts.  After some steps it kills one of SGLang's
processes (SIGKILL), at any moment or within a weight update, or stops it for good (SIGSTOP), or takes its machine from
the network until the engine is lost and two steps are trained.  It waits until the engine is back, and for some more
steps; asks every engine for its version; and ends the run (SIGTERM).  Prints a table and
writes it to --out, with the run's log and metrics.  Exit codes: 0, 1 a check does not hold, 2 the options are wrong.
"""

import argparse
import contextlib
import math
import signal
import sys
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import orjson
import psutil

from benchmarks.common.background_run import BackgroundRun, leave_in_order, show
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.common.devices import need
from benchmarks.common.endless_run import accounts, add_options, command
from benchmarks.lost_engine import dies_in_update
from benchmarks.lost_engine.two_machines import TwoMachines

KEY = "key-of-the-benchmark"
"""The key of the engines, which the benchmark asks for their weight version."""
VICTIMS = {"server": "sglang.launch_server", "scheduler": "sglang::scheduler"}
"""Part of the command line of the process to kill: SGLang's HTTP server, or the scheduler, which holds the GPU."""
EXIT_CODE = "exit code after SIGTERM"
WITHIN_AN_UPDATE = get_args(dies_in_update.Moment)
"""Moments of a weight update at which the scheduler kills itself: when asked to pause, or to receive weights."""
HANG = "hang"
"""Stop the scheduler without ending it."""
MACHINE = "machine"
"""Take the machine of an engine from the network."""
HANG_S = {"control-timeout-s": 20.0, "request-timeout-s": 30.0}
"""Deadlines for ``hang``, in seconds: the next weight update detects the engine, or else a liveness probe."""


def main(argv: Sequence[str]) -> int:
    """Measure what ``argv`` asks for; returns the exit code."""
    asked = _parse(argv)
    need(asked.device)
    told, log = _lost(asked, command(asked, _flags(asked)))
    about = circumstances("lost_engine", argv, asked.commit)
    table = ["| what | figure |", "|---|--:|", *(f"| {name} | {value} |" for name, value in told.items())]
    show(asked.out, [*table, "", *(f"- {name}: {value}" for name, value in about.items()), "", *log])
    return 0 if told["holds"] and told[EXIT_CODE] == 128 + signal.SIGTERM else 1


def _lost(asked: argparse.Namespace, command: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The result of ``found`` for a run that loses an engine, and the lines of its log that concern it."""
    armed = asked.out / "armed"
    armed.unlink(missing_ok=True)
    is_within = asked.kill in WITHIN_AN_UPDATE
    plugin = dies_in_update.environment(asked.out / "plugin", armed, asked.kill) if is_within else {}
    with contextlib.ExitStack() as blocks:
        machines = None
        if asked.kill == MACHINE:
            machines = blocks.enter_context(TwoMachines(asked.trainer_gpus + asked.engine_gpus - 1))
            plugin |= machines.environment
        run = blocks.enter_context(BackgroundRun(command, asked.out, asked.deadline_s, plugin))
        run.wait(f"{asked.steps} steps", lambda: len(run.rows()) >= asked.steps)
        if machines is None:
            _kill(run, asked.kill, armed)
        killed_after, killed_at = len(run.rows()), _now()
        if machines is not None:
            _lose(machines, run)
        run.wait("the engine was back", lambda: any("is back" in line for line in run.log()))
        back_at, back_after = _now(), len(run.rows())
        run.wait(f"{asked.steps} steps more", lambda: len(run.rows()) >= back_after + asked.steps)
        rows = run.rows()
        servers = run.processes(VICTIMS["server"]) if machines is None else machines.processes(VICTIMS["server"])
        served = {url: _version(url) for url in _urls(servers)}
        code = run.end()
    told = found(rows, killed_after, back_after, served)
    told |= {"engine away, s": round((back_at - killed_at).total_seconds(), 1), EXIT_CODE: code}
    return told, [line for line in run.log() if "WARNING" in line or "is back" in line]


def _kill(run: BackgroundRun, what: str, armed: Path) -> None:
    """Return when a process is dead or hangs; ``armed`` is the file that the plug-in waits for."""
    if what in WITHIN_AN_UPDATE:
        armed.touch()
        run.wait("a process was killed", lambda: not armed.exists())
    elif what == HANG:
        run.processes(VICTIMS["scheduler"])[0].suspend()
    else:
        run.processes(VICTIMS[what])[0].kill()


def _lose(machines: TwoMachines, run: BackgroundRun) -> None:
    """Take the other machine away, and give it back once the run has trained two steps without it."""
    machines.vanish()
    run.wait("the loss was noticed", lambda: any("restarting it" in line for line in run.log()))
    noticed_after = len(run.rows())
    run.wait("two steps without the machine", lambda: len(run.rows()) >= noticed_after + 2)
    machines.come_back()


def found(rows: list[dict[str, Any]], killed: int, back: int, served: dict[str, str]) -> dict[str, Any]:
    """Figures of the steps before the kill, until the engine was back, and after.

    ``holds``: every prompt and token is accounted for, no group failed, and all engines serve the present weights.
    ``served`` has each engine's version at the end.  The trainer's was then the last row's, or a later one.
    """
    phases = {"before": rows[1:killed], "while it was away": rows[killed:back], "after": rows[back:]}
    told: dict[str, Any] = {
        f"s per step {name} ({len(steps)} steps)": round(sum(row["time/step_s"] for row in steps) / len(steps), 2)
        for name, steps in phases.items()
        if steps
    }
    told["longest step after the loss, s"] = round(max(row["time/step_s"] for row in rows[killed:]), 1)
    told_of_accounts, are_held = accounts(rows)
    version = rows[-1]["version"]
    told |= told_of_accounts
    told |= {
        "log-probs of engine and trainer apart, last measured": f"{_last_difference(rows):.2e}",
        "version in the trainer at least": version,
        "versions served": ", ".join(served.values()),
    }
    told["holds"] = are_held and bool(served) and all(int(each) >= version for each in served.values())
    return told


def _last_difference(rows: Sequence[Mapping[str, Any]]) -> float:
    """The last measured difference of log-probs.  Steps have none if engines were slow or served other weights."""
    return next((row["train/logprob_diff"] for row in reversed(rows) if "train/logprob_diff" in row), math.nan)


def _flags(asked: argparse.Namespace) -> dict[str, object]:
    flags: dict[str, object] = {"rollout-num-gpus": asked.engine_gpus, "sglang-api-key": KEY}
    return flags | HANG_S if asked.kill == HANG else flags


def _urls(servers: Iterable[psutil.Process]) -> list[str]:
    """The URLs of the engines that run now."""
    found = []
    for process in servers:
        words = process.cmdline()
        found.append(f"http://{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}")
    return sorted(set(found))


def _version(url: str) -> str:
    asked = urllib.request.Request(f"{url}/model_info", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=10.0) as answer:
        return str(orjson.loads(answer.read())["weight_version"])


def _now() -> datetime:
    return datetime.now().astimezone()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("lost_engine", __doc__)
    add_options(parser, "lost_engine")
    add_option(parser, "--engine-gpus", int, "engines, one GPU each; on a CPU, processes", 2)
    add_option(parser, "--steps", int, "steps before the kill, and steps after the engine is back", 5)
    victims = (*VICTIMS, *WITHIN_AN_UPDATE, HANG, MACHINE)
    about = "process to kill, moment of its death, hang, or machine"
    add_option(parser, "--kill", str, about, "server", choices=victims)
    asked = parser.parse_args(argv)
    if asked.kill == MACHINE and asked.device != "cpu":
        parser.error("--kill machine needs --device cpu: both machines are this one, and would share its GPUs")
    if asked.kill == MACHINE and asked.engine_gpus < 2:
        parser.error("--kill machine needs --engine-gpus 2 or more: the run continues on the other engines")
    asked.out = asked.out.absolute()
    return asked


if __name__ == "__main__":
    leave_in_order()
    sys.exit(main(sys.argv[1:]))
