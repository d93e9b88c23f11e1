"""Date, place and way of a measurement, which are recorded with every figure."""

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("megatron-core", "ray", "sglang", "torch", "transformer-engine", "transformers")
"""Packages whose versions affect the speed of a run."""


def circumstances(name: str, argv: Sequence[str], commit: str | None = None) -> dict[str, Any]:
    """The circumstances of ``benchmarks.NAME``, called with ``argv``; give ``commit`` where there is no git."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join((f"python -m benchmarks.{name}", *argv)),
        "commit": commit or _said("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "hardware": _hardware(),
        "num_cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _hardware() -> str:
    """The names of the GPUs if there are any, else of the CPU."""
    gpus = (_said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()
    if gpus:
        return f"{len(gpus)} x {gpus[0]}"
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _said(*command: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    return None
