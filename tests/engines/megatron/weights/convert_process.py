"""The steps that tests of the conversion run in separate processes, several in each because imports take the time.

    python -m tests.engines.megatron.weights.convert_process REPORT STEPS

STEPS is a JSON list of ["command", ARGUMENT ...] and ["split", CHECKPOINT, TARGET].  The program writes a JSON list to
REPORT: for each step its result, the bytes of memory that this process had before, and its peak.  The environment has
the rank and the number of processes, as torchrun sets them, and one port for each step.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from megatron.core import dist_checkpointing

    import asyncrl.engines.megatron.checkpoint.saver  # noqa: F401 (without it Megatron's writer starts a process)

from asyncrl.engines.megatron.checkpoint.state import sharded_weights
from tests.engines.megatron.layouts import layout, loaded, processes


def command(*arguments: str) -> int:
    """Run ``python -m asyncrl.engines.megatron.weights.convert``; return its exit code."""
    sys.argv = ["convert", *arguments]
    try:
        runpy.run_module("asyncrl.engines.megatron.weights.convert", run_name="__main__")
    except SystemExit as done:
        return int(done.code or 0)
    raise AssertionError("the command did not end")


def split(checkpoint: str, target: str) -> int:
    """Let Megatron write the model that two processes share."""
    Path(target).mkdir(exist_ok=True)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    with processes(rank, 2, port), layout(tensor_model_parallel_size=2, expert_tensor_parallel_size=2):
        model, _ = loaded(Path(checkpoint), torch.bfloat16)
        dist_checkpointing.save(sharded_weights(model), target)
    return 0


def memory(what: str) -> int:
    """Bytes of memory of this process: ``VmRSS`` now, ``VmHWM`` at the peak.

    ``resource`` would report the peak of the process that this one was forked from.
    """
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def run(step: list[str], port: str) -> dict[str, int]:
    """Run one step; return its exit code and the memory that it took."""
    kind, *arguments = step
    os.environ["MASTER_PORT"] = port
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    steps: dict[str, Callable[..., int]] = {"command": command, "split": split}
    code = steps[kind](*arguments)
    return {"code": code, "before": before, "most": memory("VmHWM")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    report, steps = sys.argv[1:]
    todo = json.loads(steps)
    ports = os.environ.get("PORTS", "").split(",") if "RANK" in os.environ else [""] * len(todo)
    Path(report).write_text(json.dumps([run(step, port) for step, port in zip(todo, ports, strict=True)]))
