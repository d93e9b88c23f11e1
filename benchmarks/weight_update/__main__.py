"""The duration of weight updates, with a real trainer, real engines and answers in flight, against one raw broadcast.

    uv run python -m benchmarks.weight_update --model 1.7b --trainer-gpus 1 --engine-gpus 1             two GPUs
    uv run python -m benchmarks.weight_update --model moe-6b --trainer-gpus 1 --engine-gpus 3 --check   four GPUs
    uv run python -m benchmarks.weight_update --device cpu --model tiny --in-flight 4                   any machine
    uv run python -m benchmarks.weight_update --show a/update.json b/update.json                        a joint table

    raw       one ``torch.distributed`` broadcast of the same number of bytes, in one piece, from one process to as many
              as there are engine ranks, on the same devices: the best of some, measured first
    wait      time without training: the weights are copied (or sent, if there is no memory for a copy)
    pause     time without generation: from the first engine that stops until the last one resumes
    total     pause, and before it the time until the first engine stops: it finishes a forward pass, perhaps a prefill
    overhead  pause - 2 x raw; ``--check`` wants at most 10 ms

The first two updates are shown separately: the first one sends the names of the weights, and the second one makes the
engines' lists of copies.  Exit codes: 0, 1 ``--check`` does not hold, 2 the options are wrong.
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from asyncrl.app.signals import Signals
from asyncrl.config.areas import ClusterConfig, FailureConfig, ModelConfig, TrainConfig
from asyncrl.config.areas.parallel import parallel_problems
from asyncrl.config.areas.ranges import refuse
from asyncrl.engines.cluster.deployment import Running, deployed
from asyncrl.engines.cluster.session import ray_session
from asyncrl.engines.cluster.settings import Deployment
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.errors import AsyncRLError, ConfigError, plainly
from asyncrl.types import UpdateReport, Weights
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.common.devices import need
from benchmarks.common.parallel_options import add_parallel, parallel_of
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.full import full_rate
from benchmarks.sync_vs_async.options import ON_GPUS
from benchmarks.sync_vs_async.workload import ForcedWorkload, write_checkpoint
from benchmarks.weight_update.raw_broadcast import raw_s_of

ALLOWED_OVERHEAD_S = 0.010
"""Most seconds of a pause beyond twice the raw broadcast: the project's target."""
BETWEEN_S = 0.5
"""Seconds between two updates, in which the engines generate again, as in a run."""
TIMEOUT_S = 120.0
START_S = 600.0
LONG_S = 3600.0
"""Seconds of traffic: longer than the updates take."""

Rows = list[tuple[float, UpdateReport]]
"""For each update, the seconds that training waited, and the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFigures:
    """The figures of one call; times in seconds."""

    model: str
    num_bytes: int
    trainer_ranks: int
    engines: int
    in_flight: int
    raw_s: float
    waits_s: tuple[float, ...]
    pauses_s: tuple[float, ...]
    totals_s: tuple[float, ...]
    """Seconds of each update, the first two included."""
    is_copied: bool
    about: dict[str, Any]

    @property
    def pause_s(self) -> float:
        """Median pause, without the first two updates."""
        return median(self.pauses_s[2:])

    @property
    def overhead_s(self) -> float:
        """Median pause minus twice the raw broadcast."""
        return self.pause_s - 2 * self.raw_s


def main(argv: Sequence[str]) -> int:
    """Measure and show what ``argv`` asks for; returns the exit code."""
    asked, console = _parser().parse_args(argv), Console()
    if not console.is_terminal:
        console.width = 200
    try:
        if asked.show:
            found = [UpdateFigures(**orjson.loads(path.read_bytes())) for path in asked.show]
        else:
            need(asked.device)
            refuse(parallel_problems(parallel_of(asked), asked.trainer_gpus))
            found = [_measured(asked, argv, console)]
    except AsyncRLError as error:
        console.print(f"error: {error}", style="red", highlight=False)
        return 2 if isinstance(error, ConfigError) else 1
    console.print(_table(found))
    return int(asked.check and any(each.overhead_s > ALLOWED_OVERHEAD_S for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("weight_update", __doc__)
    add_option(parser, "--model", str, "shape of the model, which gets random weights", "1.7b", choices=list(SHAPES))
    add_option(parser, "--device", str, "device of trainer and engines", "cuda", choices=["cuda", "cpu"])
    add_option(parser, "--trainer-gpus", int, "trainer ranks, one GPU each; on a CPU, processes", 1)
    add_option(parser, "--engine-gpus", int, "engines, one GPU each; on a CPU, processes", 1)
    add_option(parser, "--in-flight", int, "answers in flight per engine", 128)
    add_option(parser, "--updates", int, "number of updates; the first two are shown separately", 12)
    add_option(parser, "--bucket-mib", int, "size of a bucket of weights, in MiB", 512)
    parser.add_argument(
        "--during-training",
        action=argparse.BooleanOptionalAction,
        help="--update-weights-during-training of a run (default: where memory allows)",
    )
    parser.add_argument("--verify", action="store_true", help="--check-weight-updates of a run, which takes time")
    parser.add_argument(
        "--check", action="store_true", help=f"exit code 1 if the overhead exceeds {1000 * ALLOWED_OVERHEAD_S:g} ms"
    )
    add_option(parser, "--checkpoint", Path, "folder to keep the model in, or one that has it")
    add_option(parser, "--commit", str, "commit to record where there is no git")
    add_option(parser, "--out", Path, "folder for update.json and logs", Path("runs/weight_update"))
    add_option(parser, "--show", Path, "update.json files of earlier calls to show in one table", nargs="+")
    add_parallel(parser.add_argument_group("layout of the trainer (docs/parallelism.md)"))
    return parser


def _measured(asked: argparse.Namespace, argv: Sequence[str], console: Console) -> UpdateFigures:
    asked.out.mkdir(parents=True, exist_ok=True)
    about = circumstances("weight_update", argv, asked.commit)
    with Signals.caught() as signals, tempfile.TemporaryDirectory() as folder:
        checkpoint = (asked.checkpoint or Path(folder) / "model").resolve()
        if not (checkpoint / "tokenizer_config.json").exists():  # the file that is written last
            console.print(f"writing random weights: {asked.model}", highlight=False)
            _in_a_process(write_checkpoint, checkpoint, asked.model, asked.device)
        num_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        raw_s = raw_s_of(asked, num_bytes)
        console.print(f"raw broadcast of {num_bytes / 1e9:.2f} GB: {1000 * raw_s:.1f} ms", highlight=False)
        signals.remember()
        with (
            ray_session(asked.trainer_gpus + asked.engine_gpus + 1, hold_signals=signals.hold) as ray,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            rows, sent, is_copied = runner.run(_updates(ray, asked, checkpoint, signals, console))
    found = UpdateFigures(
        model=asked.model,
        num_bytes=sent,
        trainer_ranks=asked.trainer_gpus,
        engines=asked.engine_gpus,
        in_flight=asked.in_flight,
        raw_s=raw_s,
        waits_s=tuple(wait for wait, _ in rows),
        pauses_s=tuple(report.pause_s for _, report in rows),
        totals_s=tuple(report.total_s for _, report in rows),
        is_copied=is_copied,
        about=about,
    )
    (asked.out / "update.json").write_bytes(orjson.dumps(asdict(found), option=orjson.OPT_INDENT_2))
    return found


# ---- the product's update


async def _updates(
    ray: ModuleType, asked: argparse.Namespace, checkpoint: Path, signals: Signals, console: Console
) -> tuple[Rows, int, bool]:
    """Wait and report of each update, bytes of one update, and whether training continues during updates."""
    with signals.cancelling():
        async with deployed(
            ray, _deployment(asked, checkpoint), lambda text: console.print(text, highlight=False)
        ) as up:
            with plainly():
                async with asyncio.TaskGroup() as watchers:
                    tasks = [watchers.create_task(up.watch())]
                    if asked.in_flight:
                        tasks.append(watchers.create_task(_traffic(up, asked)))
                    found = await _timed_updates(up, asked.updates)
                    for task in tasks:
                        task.cancel()
    return found


async def _timed_updates(up: Running, times: int) -> tuple[Rows, int, bool]:
    clock = asyncio.get_running_loop().time
    rows, is_copied, num_bytes = Rows(), False, 0
    for version in range(1, times + 1):
        await asyncio.sleep(BETWEEN_S)
        start = clock()
        is_copied = await up.updater.snapshot()
        taken = clock()
        report = await up.updater.publish(Weights(version=version, step=version))
        rows.append((taken - start if is_copied else clock() - start, report))
        num_bytes = report.num_bytes
    return rows, num_bytes, is_copied


async def _traffic(up: Running, asked: argparse.Namespace) -> None:
    """Keep ``--in-flight`` answers per engine in flight and drop them, until cancelled."""
    longest = 8192 if asked.device == "cuda" else 256
    workload = ForcedWorkload(
        vocabulary=SHAPES[asked.model]["vocab_size"], prompt_tokens=16, median=longest // 16, longest=longest, seed=1
    )
    slots = asked.in_flight * asked.engine_gpus
    await full_rate(up.engine, workload, slots, 8, Weights(version=0, step=0), LONG_S)


def _deployment(asked: argparse.Namespace, checkpoint: Path) -> Deployment:
    logs = (asked.out / "logs").resolve()
    logs.mkdir(exist_ok=True)
    return Deployment(
        cluster=ClusterConfig(
            actor_num_gpus_per_node=asked.trainer_gpus,
            rollout_num_gpus=asked.engine_gpus,
            use_router=False,
            start_timeout_s=START_S,
        ),
        failures=FailureConfig(
            request_timeout_s=TIMEOUT_S,
            control_timeout_s=TIMEOUT_S,
            train_timeout_s=TIMEOUT_S,
            max_engine_restarts=0,
        ),
        trainer=TrainerSettings(
            model=ModelConfig(hf_checkpoint=checkpoint, seed=1),
            train=TrainConfig(
                update_weight_buffer_size=asked.bucket_mib * 2**20,
                update_weights_during_training=asked.during_training,
                check_weight_updates=asked.verify,
            ),
            parallel=parallel_of(asked),
            device=asked.device,
            dtype="bfloat16" if asked.device == "cuda" else "float32",
            row_tokens=1,  # nothing is trained, so no activations take the memory for a copy
            temperature=1.0,
            num_steps_per_rollout=1,
            use_rollout_logprobs=True,
            timeout_s=TIMEOUT_S,
        ),
        server_flags=ON_GPUS if asked.device == "cuda" else {},
        logs=logs,
    )


def _in_a_process(function: Any, *args: Any) -> None:
    """Run ``function`` in a new process, for this one must hold no GPU.  Raises ConfigError."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join(START_S)
    if process.exitcode != 0:
        with suppress(OSError):
            process.kill()
        raise ConfigError(f"writing the checkpoint failed: exit code {process.exitcode}")


# ---- the table


def _table(found: Sequence[UpdateFigures]) -> Table:
    table = Table(title="weight updates", title_justify="left")
    for name in ("model", "GB", "ranks", "engines", "in flight", "raw ms", "GB/s"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name in ("wait ms", "pause ms", "max", "total ms", "pause / raw", "overhead ms", "first pauses ms", "holds"):
        table.add_column(name, justify="right")
    for each in found:
        rest = each.pauses_s[2:]
        table.add_row(
            each.model,
            f"{each.num_bytes / 1e9:.2f}",
            str(each.trainer_ranks),
            str(each.engines),
            str(each.in_flight),
            f"{1000 * each.raw_s:.1f}",
            f"{each.num_bytes / each.raw_s / 1e9:.0f}",
            f"{1000 * median(each.waits_s[2:]):.1f}" + ("" if each.is_copied else " (sends)"),
            f"{1000 * each.pause_s:.1f}",
            f"{1000 * max(rest):.1f}",
            f"{1000 * median(each.totals_s[2:]):.1f}",
            f"{each.pause_s / each.raw_s:.2f}",
            f"{1000 * each.overhead_s:+.1f}",
            ", ".join(f"{1000 * pause:.0f}" for pause in each.pauses_s[:2]),
            "yes" if each.overhead_s <= ALLOWED_OVERHEAD_S else "no",
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
