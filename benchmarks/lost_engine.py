"""A run that loses an engine: what it costs, whether anything is lost, and which weights the engine comes back with.

    uv run benchmarks/lost_engine.py --trainer-gpus 2 --engine-gpus 2 --model 1.7b                   four GPUs
    uv run benchmarks/lost_engine.py --device cpu --model tiny --groups 4 --group-size 4 --longest 32 --use-router

Starts train_async.py as a user would, on random weights and prompts; kills one of SGLang's processes (SIGKILL) after
some steps, anywhere or within a weight update; waits until its engine is back, and for some more steps; asks every
engine for the version that it serves; ends the run (SIGTERM).  Prints a table and writes it to --out, beside the run's
log and metrics.  Exit codes: 0, 1 something does not hold, 2 the options are wrong.
"""

import argparse
import math
import random
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
from rich.console import Console

from benchmarks import _dies_in_update
from benchmarks._circumstances import circumstances
from benchmarks._shapes import SHAPES
from benchmarks._sync_vs_async_options import ON_GPUS
from benchmarks._sync_vs_async_workload import write_checkpoint

ROOT = Path(__file__).parents[1]
MARK = "ASYNCRL_LOST_ENGINE"
"""Environment variable that all processes of the run inherit."""
LOOK_EVERY_S = 0.1
"""At files that the run writes."""
PROMPT_WORDS = 60
TOKEN_FATES = ("trained", "masked", "filtered", "stale", "failed", "held")
GROUP_FATES = ("trained", "filtered", "stale", "failed", "in_flight", "partial", "buffered", "training")
"""Those that settle a group, and where it is before."""
VICTIMS = {"server": "sglang.launch_server", "scheduler": "sglang::scheduler"}
"""What the command line of a process to kill has in it: SGLang's front, or what has the GPU."""
UPDATE = "update"
"""To be killed: what has the GPU, by its own hand, when it is to receive weights."""


class Run:
    """train_async.py beside us, until the end of a ``with``."""

    def __init__(self, asked: argparse.Namespace, arguments: Sequence[str]) -> None:
        self.folder: Path = asked.out / "run"
        self._deadline = time.monotonic() + asked.deadline_s
        self._mark = uuid.uuid4().hex
        self._output = asked.out / "output.txt"
        self._armed = asked.out / "armed"
        command = [sys.executable, "train_async.py", "--run-dir", str(self.folder), "--progress", "lines", *arguments]
        with self._output.open("w") as output:
            environment = {**psutil.Process().environ(), MARK: self._mark}
            if asked.kill == UPDATE:
                environment |= self._with_plugin(asked.out / "plugin", environment)
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, so far."""
        file = self.folder / "metrics.jsonl"
        return [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []

    def log(self) -> list[str]:
        """Lines of run.log, so far."""
        file = self.folder / "run.log"
        return file.read_text().splitlines() if file.exists() else []

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        """Raises SystemExit if the run ends before, or time is up."""
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                raise SystemExit(f"error: not {what}: {self._output.read_text()[-3000:]}")
            time.sleep(LOOK_EVERY_S)

    def kill(self, what: str) -> None:
        """Return when the process is dead."""
        if what != UPDATE:
            self.processes(VICTIMS[what])[0].kill()
            return
        self._armed.touch()
        self.wait("killed", lambda: not self._armed.exists())

    def processes(self, text: str) -> list[psutil.Process]:
        """Of this run, with ``text`` in their command lines."""
        return [each for each in psutil.process_iter() if text in _command(each) and self._is_ours(each)]

    def end(self) -> int:
        """Send SIGTERM if it runs; the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=60.0)
        except subprocess.TimeoutExpired:
            for process in self.processes(""):
                process.kill()
            return self._process.wait()

    def _with_plugin(self, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
        _dies_in_update.install(folder)
        self._armed.unlink(missing_ok=True)
        paths = str(folder), str(ROOT), environment.get("PYTHONPATH", "")
        return {_dies_in_update.ARMED: str(self._armed), "PYTHONPATH": ":".join(filter(None, paths))}

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False


def main(argv: Sequence[str]) -> int:
    """Run it all."""
    asked = _parse(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    checkpoint = asked.checkpoint or asked.out / "model"
    if not (checkpoint / "config.json").is_file():
        write_checkpoint(checkpoint, asked.model, asked.device)
    prompts = asked.out / "prompts.jsonl"
    _write_prompts(prompts)
    with Run(asked, _arguments(asked, checkpoint, prompts)) as run:
        run.wait(f"{asked.steps} steps", lambda: len(run.rows()) >= asked.steps)
        killed_after = len(run.rows())
        killed_at = _now()
        run.kill(asked.kill)
        run.wait("back", lambda: any("is back" in line for line in run.log()))
        back_at, back_after = _now(), len(run.rows())
        run.wait(f"{asked.steps} steps more", lambda: len(run.rows()) >= back_after + asked.steps)
        rows = run.rows()
        served = {url: _version(url) for url in _urls(run)}
        code = run.end()
    told = found(rows, killed_after, back_after, served)
    told["engine away, s"] = round((back_at - killed_at).total_seconds(), 1)
    told["exit code after SIGTERM"] = code
    about = circumstances("lost_engine.py", argv, asked.commit)
    lines = ["| what | figure |", "|---|--:|", *(f"| {name} | {value} |" for name, value in told.items())]
    log = [line for line in run.log() if "WARNING" in line or "is back" in line]
    text = "\n".join([*lines, "", *(f"- {name}: {value}" for name, value in about.items()), "", *log])
    (asked.out / "table.md").write_text(text + "\n")
    Console(width=200).print(text, highlight=False, markup=False, soft_wrap=True)
    return 0 if told["holds"] and code == 128 + signal.SIGTERM else 1


def found(rows: list[dict[str, Any]], killed: int, back: int, served: dict[str, str]) -> dict[str, Any]:
    """What there is to say of the steps before the kill, of those until the engine was back, and after.

    ``holds``: every prompt and token is accounted for, no group failed, and all engines serve the present weights.
    ``served`` has each engine's version at the end, when the trainer had that of the last row, or a later one.
    """
    phases = {"before": rows[1:killed], "while it was away": rows[killed:back], "after": rows[back:]}
    told: dict[str, Any] = {
        f"s per step {name} ({len(steps)} steps)": round(sum(row["time/step_s"] for row in steps) / len(steps), 2)
        for name, steps in phases.items()
        if steps
    }
    last = rows[-1]
    is_balanced = all(row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in TOKEN_FATES) for row in rows)
    admitted = sum(last[f"groups/{fate}"] for fate in GROUP_FATES)
    told |= {
        "groups admitted / accounted for": f"{last['groups/admitted']} / {admitted}",
        "groups failed, stale": f"{last['groups/failed']}, {last['groups/stale']}",
        "tokens add up in every step": is_balanced,
        "samples sent again": last["retries"],
        "steps without a gap": [row["step"] for row in rows] == list(range(len(rows))),
        "lag, most": max(row["lag/max"] for row in rows),
        "log-probs of engine and trainer apart, last measured": f"{_last_difference(rows):.2e}",
        "version in the trainer at least": last["version"],
        "versions served": ", ".join(served.values()),
    }
    are_current = bool(served) and all(int(version) >= last["version"] for version in served.values())
    told["holds"] = (
        last["groups/admitted"] == admitted
        and last["groups/failed"] == 0
        and is_balanced
        and told["steps without a gap"]
        and are_current
    )
    return told


def _last_difference(rows: Sequence[Mapping[str, Any]]) -> float:
    """Some steps have none: engines served other weights then."""
    return next((row["train/logprob_diff"] for row in reversed(rows) if "train/logprob_diff" in row), math.nan)


def _arguments(asked: argparse.Namespace, checkpoint: Path, prompts: Path) -> list[str]:
    flags: dict[str, object] = {
        "device": asked.device,
        "hf-checkpoint": checkpoint,
        "prompt-data": prompts,
        "input-key": "prompt",
        "label-key": "label",
        "rm-type": "number",
        "actor-num-gpus-per-node": asked.trainer_gpus,
        "rollout-num-gpus": asked.engine_gpus,
        "rollout-batch-size": asked.groups,
        "n-samples-per-prompt": asked.group_size,
        "rollout-max-response-len": asked.longest,
        "num-rollout": 100_000,
        "max-staleness": asked.staleness,
        "max-tokens-per-gpu": asked.max_tokens_per_gpu,
        "lr": 1e-6,
    }
    if asked.device == "cuda":
        flags |= {f"sglang-{name}": value for name, value in ON_GPUS.items() if value is not True}
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    if asked.device == "cuda":
        arguments += [f"--sglang-{name}" for name, value in ON_GPUS.items() if value is True]
    return arguments if asked.use_router else [*arguments, "--no-use-router"]


def _write_prompts(file: Path) -> None:
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    with file.open("wb") as lines:
        for _ in range(4096):
            words = ("".join(draw.choices(letters, k=4)) for _ in range(PROMPT_WORDS))
            lines.write(orjson.dumps({"prompt": " ".join(words), "label": "1"}) + b"\n")


def _urls(run: Run) -> list[str]:
    """Of the engines that run now."""
    found = []
    for process in run.processes(VICTIMS["server"]):
        words = process.cmdline()
        found.append(f"http://{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}")
    return sorted(set(found))


def _version(url: str) -> str:
    with urllib.request.urlopen(f"{url}/model_info", timeout=10.0) as answer:
        return str(orjson.loads(answer.read())["weight_version"])


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _now() -> datetime:
    return datetime.now().astimezone()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1.7b")
    parser.add_argument("--checkpoint", type=Path, help="a folder to write the model to, or that has it")
    parser.add_argument("--trainer-gpus", type=int, default=1)
    parser.add_argument("--engine-gpus", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16, help="per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512, help="tokens of every answer, since no token ends one")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=5, help="before the kill, and after the return")
    parser.add_argument("--kill", choices=(*VICTIMS, UPDATE), default="server")
    parser.add_argument("--use-router", action="store_true")
    parser.add_argument("--deadline-s", type=float, default=900.0)
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=Path, default=Path("lost_engine"))
    asked = parser.parse_args(argv)
    asked.out = asked.out.absolute()
    return asked


def _leave(number: int, _frame: object) -> None:
    """What a ``with`` began is ended."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
