"""A rehearsal of a launch script of configs/ on this machine's GPUs, with random weights: speed and memory.

    uv run python -m benchmarks.rehearse configs/qwen3-4b.sh --config tests/launch/models/qwen3-4b/config.json
    uv run python -m benchmarks.rehearse configs/qwen3-30b-a3b.sh --config config.json --longest 4096 -- --lr 1e-5
    uv run python -m benchmarks.rehearse configs/glm-z1-9b.sh --config small/config.json --device cpu --longest 16

Writes random weights of the shape of --config, a tokenizer of made-up words, and prompts of such words.  Starts the
script with changes: answers have --longest tokens, since no token ends one; rewards are random; evaluation has four
prompts; nothing is saved; flags after ``--`` are added.  After --steps it reads the GPUs' memory and ends the run
(SIGTERM).  Prints a table with the script's dry run.  Exit codes: 0, 1 the run failed, 2 the options are wrong.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.background_run import BackgroundRun, command_line, leave_in_order, show, write_prompts
from benchmarks.common.circumstances import ROOT, circumstances
from benchmarks.common.command_line import add_option, parser_of, split_at_dashes
from benchmarks.common.devices import need
from benchmarks.sync_vs_async.workload import write_shape

NUM_EVAL_PROMPTS = 4
DRY_RUN_S = 120
COLUMNS = {
    "step": ("step", "d"),
    "time/step_s": ("s", ".1f"),
    "time/train_s": ("of that training", ".1f"),
    "time/trainer_waited_s": ("waiting", ".1f"),
    "tokens/trained": ("tokens trained so far", ",d"),
    "groups/trained": ("groups trained", "d"),
    "groups/filtered": ("filtered", "d"),
    "lag/max": ("lag, most", "d"),
    "time/update_pause_s": ("pause, s", ".3f"),
    "train/logprob_diff": ("log-probs apart", ".1e"),
    "train/peak_memory_gb": ("trainer's peak, GB", ".1f"),
}
"""Columns of the table: a metric of metrics.jsonl, the column's title, and the format of its numbers."""


def main(argv: Sequence[str]) -> int:
    """Rehearse what ``argv`` asks for; returns the exit code."""
    asked = _parse(argv)
    need(asked.device)
    asked.out.mkdir(parents=True, exist_ok=True)
    checkpoint = asked.checkpoint or asked.out / "model"
    _write_checkpoint(checkpoint, asked)
    environment = _environment(asked.out, checkpoint)
    command = ["bash", asked.script, *_changes(asked), *asked.flags]
    dry_run = _dry_run(command, environment)
    began = time.monotonic()
    with BackgroundRun(command, asked.out, asked.deadline_s, environment) as run:
        run.wait("a first step", lambda: len(run.rows()) >= 1)
        first_s = time.monotonic() - began
        run.wait(f"{asked.steps} steps", lambda: len(run.rows()) >= asked.steps)
        rows, used, code = run.rows(), _gpu_memory(), run.end()
    about = {"until the first step was over, s": round(first_s), "exit code after SIGTERM": code}
    about |= circumstances("rehearse", argv, asked.commit)
    show(asked.out, [*report(rows, dry_run, used), "", *(f"- {name}: {value}" for name, value in about.items())])
    return 0 if code == 128 + signal.SIGTERM else 1


def _environment(out: Path, checkpoint: Path) -> dict[str, str]:
    """The environment variables that a script reads, and the data they name, which is written to ``out``."""
    train, held_out = out / "prompts.jsonl", out / "eval.jsonl"
    write_prompts(train, as_chat=True)
    held_out.write_bytes(b"".join(train.read_bytes().splitlines(keepends=True)[:NUM_EVAL_PROMPTS]))
    return {
        "MODEL": str(checkpoint),
        "TRAIN_DATA": str(train),
        "EVAL_DATA": str(held_out),
        "RUNS": str(out / "runs"),
        "PYTHON": sys.executable,
        "PYTHONPATH": ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
    }


def report(rows: Sequence[dict[str, Any]], dry_run: str, used: Sequence[str]) -> list[str]:
    """Lines of Markdown.  A cell is empty if a step has no such number."""
    names = [name for name, _ in COLUMNS.values()]
    lines = ["| " + " | ".join(names) + " |", "|--:" * len(names) + "|"]
    for row in rows:
        cells = ("" if row.get(key) is None else format(row[key], kind) for key, (_, kind) in COLUMNS.items())
        lines.append("| " + " | ".join(cells) + " |")
    memory = [f"- memory of the GPUs at the end: {', '.join(used)}"] if used else []
    return [*lines, "", *memory, "", "```", dry_run.rstrip(), "```"]


def _changes(asked: argparse.Namespace) -> list[str]:
    """Flags that replace some of the script's."""
    flags: dict[str, object] = {
        "rollout-max-response-len": asked.longest,
        "custom-rm-path": "benchmarks.common.random_reward.reward",
        "num-rollout": 100_000,
        "save-interval": 100_000,
        "n-samples-per-eval-prompt": 1,
    }
    return command_line(flags, device=asked.device, use_router=asked.use_router)


def _dry_run(command: Sequence[str | Path], environment: dict[str, str]) -> str:
    """The output of the script's dry run.  Raises SystemExit if it fails."""
    found = subprocess.run(
        ["timeout", str(DRY_RUN_S), *command, "--dry-run"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        raise SystemExit(f"error: the dry run failed:\n{found.stdout}{found.stderr}")
    return found.stdout


def _gpu_memory() -> list[str]:
    """The memory in use on each GPU of this machine, by any process."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30.0, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _write_checkpoint(folder: Path, asked: argparse.Namespace) -> None:
    """Write the checkpoint unless it exists, in a new process: this one must hold no GPU.  Raises SystemExit."""
    if (folder / "config.json").is_file():
        wanted, there = (json.loads(file.read_text()) for file in (asked.config, folder / "config.json"))
        is_whole = (folder / "tokenizer_config.json").is_file()  # the file that is written last
        if not is_whole or there | {"eos_token_id": None} != wanted | {"eos_token_id": None}:
            raise SystemExit(f"error: {folder} does not hold a whole model of {asked.config}; remove it")
        return
    writer = multiprocessing.get_context("spawn").Process(target=write_shape, args=(folder, asked.config, asked.device))
    writer.start()
    writer.join(asked.deadline_s)
    if writer.exitcode != 0:
        writer.kill()
        raise SystemExit(f"error: --config {asked.config} --device {asked.device}: writing random weights failed")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("rehearse", __doc__)
    parser.add_argument("script", type=Path, help="launch script, such as configs/qwen3-4b.sh")
    add_option(parser, "--config", Path, "config.json of the model, in Hugging Face format", required=True)
    add_option(parser, "--checkpoint", Path, "folder to keep the model in, or one that has it")
    add_option(parser, "--device", str, "device of trainer and engines", "cuda", choices=("cuda", "cpu"))
    add_option(parser, "--steps", int, "training steps to run", 3)
    add_option(parser, "--longest", int, "tokens of every answer, since no token ends one", 2048)
    parser.add_argument("--use-router", action="store_true", help="requests sent through SGLang's router")
    add_option(parser, "--deadline-s", float, "seconds for the whole rehearsal", 1800.0)
    add_option(parser, "--commit", str, "commit to record where there is no git")
    add_option(parser, "--out", Path, "folder for all files", Path("runs/rehearsal"))
    own, further = split_at_dashes(argv)
    asked = parser.parse_args(own)
    for path in (asked.script, asked.config):
        if not path.is_file():
            parser.error(f"{path}: no such file")
    asked.flags, asked.out, asked.script = further, asked.out.absolute(), asked.script.absolute()
    asked.checkpoint = asked.checkpoint.absolute() if asked.checkpoint else None
    return asked


if __name__ == "__main__":
    leave_in_order()
    sys.exit(main(sys.argv[1:]))
