"""A run on random weights and prompts, without an end, for a benchmark that kills one of its processes."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.background_run import command_line, write_prompts
from benchmarks.common.command_line import add_option
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.workload import write_checkpoint

TOKEN_FATES = ("trained", "masked", "filtered", "stale", "failed", "held")
GROUP_FATES = ("trained", "filtered", "stale", "failed", "in_flight", "partial", "buffered", "training")
"""Final states of a group, then the states before."""


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of the run, and those of every benchmark ``name`` of that kind."""
    add_option(parser, "--device", str, "device of trainer and engines", "cuda", choices=("cuda", "cpu"))
    add_option(parser, "--model", str, "shape of the model, which gets random weights", "1.7b", choices=sorted(SHAPES))
    add_option(parser, "--checkpoint", Path, "folder to keep the model in, or one that has it")
    add_option(parser, "--trainer-gpus", int, "trainer ranks, one GPU each; on a CPU, processes", 1)
    add_option(parser, "--groups", int, "groups per step", 16)
    add_option(parser, "--group-size", int, "samples per group", 8)
    add_option(parser, "--longest", int, "tokens of every answer, since no token ends one", 512)
    add_option(parser, "--staleness", int, "--max-staleness of the run, in steps", 2)
    add_option(parser, "--max-tokens-per-gpu", int, "tokens per microbatch of the trainer", 16_384)
    parser.add_argument("--use-router", action="store_true", help="requests sent through SGLang's router")
    add_option(parser, "--deadline-s", float, "seconds for the whole benchmark", 900.0)
    add_option(parser, "--commit", str, "commit to record where there is no git")
    add_option(parser, "--out", Path, "folder for all files", Path("runs") / name)


def command(asked: argparse.Namespace, flags: Mapping[str, object]) -> list[str]:
    """Write the model, unless it is there, and the prompts; return the run's command with ``flags`` besides its own."""
    asked.out.mkdir(parents=True, exist_ok=True)
    checkpoint = asked.checkpoint or asked.out / "model"
    if not (checkpoint / "config.json").is_file():
        write_checkpoint(checkpoint, asked.model, asked.device)
    prompts = asked.out / "prompts.jsonl"
    write_prompts(prompts)
    own: dict[str, object] = {
        "hf-checkpoint": checkpoint,
        "prompt-data": prompts,
        "input-key": "prompt",
        "label-key": "label",
        "rm-type": "number",
        "actor-num-gpus-per-node": asked.trainer_gpus,
        "rollout-batch-size": asked.groups,
        "n-samples-per-prompt": asked.group_size,
        "rollout-max-response-len": asked.longest,
        "num-rollout": 100_000,
        "max-staleness": asked.staleness,
        "max-tokens-per-gpu": asked.max_tokens_per_gpu,
        "lr": 1e-6,
    }
    words = command_line({**own, **flags}, device=asked.device, use_router=asked.use_router)
    return [sys.executable, "train_async.py", *words]


def accounts(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Figures of groups and tokens, and whether all of them are accounted for and no group failed."""
    last = rows[-1]
    admitted = sum(last[f"groups/{fate}"] for fate in GROUP_FATES)
    told = {
        "groups admitted / accounted for": f"{last['groups/admitted']} / {admitted}",
        "groups failed, stale": f"{last['groups/failed']}, {last['groups/stale']}",
        "tokens add up in every step": all(
            row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in TOKEN_FATES) for row in rows
        ),
        "samples sent again": last["retries"],
        "steps without a gap": [row["step"] for row in rows] == list(range(len(rows))),
        "lag, most": max(row["lag/max"] for row in rows),
    }
    is_balanced = last["groups/admitted"] == admitted and last["groups/failed"] == 0
    return told, is_balanced and told["tokens add up in every step"] and told["steps without a gap"]
