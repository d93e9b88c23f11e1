"""A run of the product in the background of a benchmark: started as a user would, observed through its files."""

import random
import signal
import string
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import psutil
from rich.console import Console

from benchmarks.common.circumstances import ROOT
from benchmarks.sync_vs_async.options import ON_GPUS

MARK = "ASYNCRL_BENCHMARK"
"""Environment variable that all processes of the run inherit."""
LOOK_EVERY_S = 0.1
"""Seconds between two looks at the files that the run writes."""
LEAVE_S = 60.0
"""Seconds for the run to end after SIGTERM."""
PROMPT_WORDS = 60


def write_prompts(file: Path, *, as_chat: bool = False) -> None:
    """Write prompts of random words with a label; ``as_chat``: each as a list of messages."""
    draw = random.Random(0)
    with file.open("wb") as lines:
        for _ in range(4096):
            words = " ".join("".join(draw.choices(string.ascii_lowercase, k=4)) for _ in range(PROMPT_WORDS))
            prompt = [{"role": "user", "content": words}] if as_chat else words
            lines.write(orjson.dumps({"prompt": prompt, "label": "1"}) + b"\n")


def command_line(flags: Mapping[str, object], *, device: str, use_router: bool) -> list[str]:
    """``flags`` as arguments, with the flags that SGLang needs on a GPU without its optional kernels."""
    own = {f"sglang-{name}": value for name, value in ON_GPUS.items()} if device == "cuda" else {}
    words = ["--device", device, *([] if use_router else ["--no-use-router"])]
    for name, value in {**flags, **own}.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def show(out: Path, lines: Sequence[str]) -> None:
    """Print ``lines`` and write them to ``table.md``."""
    text = "\n".join(lines)
    (out / "table.md").write_text(text + "\n")
    Console(width=200).print(text, highlight=False, markup=False, soft_wrap=True)


class BackgroundRun:
    """A running command that takes train_async.py's flags; leaving the ``with`` block ends it."""

    def __init__(
        self, command: Sequence[str | Path], out: Path, deadline_s: float, environment: Mapping[str, str]
    ) -> None:
        """Start ``command`` with a --run-dir in ``out``.  ``environment`` is added to this process's.

        Raises SystemExit if ``out`` has a run already.
        """
        self.folder = out / "run"
        if self.folder.exists() and any(self.folder.iterdir()):
            raise SystemExit(f"error: {self.folder} is of another run; give another --out")
        self._output = out / "output.txt"
        self._deadline = time.monotonic() + deadline_s
        self._mark = uuid.uuid4().hex
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--run-dir", str(self.folder), "--progress", "lines"],
                cwd=ROOT,
                env={**psutil.Process().environ(), **environment, MARK: self._mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "BackgroundRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def rows(self) -> list[dict[str, Any]]:
        """Complete rows of metrics.jsonl, so far."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []  # the last one may be half written
        return [orjson.loads(line) for line in lines]

    def log(self) -> list[str]:
        """Lines of run.log, so far."""
        file = self.folder / "run.log"
        return file.read_text().splitlines() if file.exists() else []

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until ``is_so``.  Raises SystemExit if the run ends first or its deadline passes."""
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                output = self._output.read_text()[-3000:]
                raise SystemExit(f"error: the run ended or ran out of time before {what}: {output}")
            time.sleep(LOOK_EVERY_S)

    def processes(self, text: str) -> list[psutil.Process]:
        """The run's processes whose command lines contain ``text``."""
        return [each for each in psutil.process_iter() if text in _command(each) and self._is_ours(each)]

    def end(self) -> int:
        """Send SIGTERM if the run has not ended; returns its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:
            for process in self.processes(""):
                process.kill()
            return self._process.wait()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False


def leave_in_order() -> None:
    """Make SIGTERM leave the open ``with`` blocks from now on, so that they end what they started."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
