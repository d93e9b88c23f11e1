"""A run whose trainer dies and starts again: the time without training, and what happens to tokens and groups.

    uv run python -m benchmarks.lost_trainer                            two GPUs
    uv run python -m benchmarks.lost_trainer --kill update              one death, within a weight update
    uv run python -m benchmarks.lost_trainer --device cpu --model tiny --groups 4 --group-size 4 --longest 32

Starts train_async.py as a user would, on random weights and prompts.  A trainer rank is killed (SIGKILL) at any moment,
then one within a weight update, and then one is stopped for good (SIGSTOP).  After each, the benchmark waits until the
run has restarted the trainer, and for some more steps.  Then it ends the run (SIGTERM), prints a table and writes it to
--out.  Exit codes: 0, 1 a check does not hold, 2 the options are wrong.
"""

import argparse
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos import holds
from benchmarks.common.background_run import BackgroundRun, leave_in_order, show
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.common.devices import need
from benchmarks.common.endless_run import accounts, add_options, command

RANK = "ray::RankActor"
ENGINE = ("sglang.launch_server", "sglang::scheduler")
"""Parts of the command lines of a trainer rank, and of the processes of an engine."""
ANY, UPDATE, HANG = MOMENTS = ("any", "update", "hang")
DEADLINES = {"control-timeout-s": 20.0, "train-timeout-s": 120.0, "request-timeout-s": 60.0}
"""Deadlines of the run, in seconds; the first one detects a stopped rank."""
LOST, BACK = "the trainer is lost", r"trainer restarted: (\d+) steps trained again in ([\d.]+) s"
"""Text of the log when a loss is noticed, and a pattern of the line when the trainer is back."""
EXIT_CODE = "exit code after SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One death of the trainer, and what the run did about it."""

    moment: str
    noticed_s: float
    away_s: float
    """Seconds without a trainer, from the moment at which the run noticed."""
    steps_again: int
    tokens_before: int
    """Generated tokens of the last step before."""
    tokens_after: int
    """Generated tokens of the first step after."""
    step_s: float
    """Seconds of the steps before, each."""
    are_engines_same: bool


def main(argv: Sequence[str]) -> int:
    """Measure what ``argv`` asks for; returns the exit code."""
    asked = _parse(argv)
    need(asked.device)
    words = command(asked, _flags(asked))
    hold = asked.out / "hold"
    with BackgroundRun(words, asked.out, asked.deadline_s, holds.environment(hold, asked.out / "saved")) as run:
        losses = [_lost(run, moment, asked) for moment in asked.kill]
        num_rows = len(run.rows())
        run.wait(f"{asked.steps} steps more", lambda: len(run.rows()) >= num_rows + asked.steps)
        code = run.end()
    told = found(run.rows(), losses, asked.staleness) | {EXIT_CODE: code}
    about = circumstances("lost_trainer", argv, asked.commit)
    table = ["| what | figure |", "|---|--:|", *(f"| {name} | {value} |" for name, value in told.items())]
    log = [line for line in run.log() if "WARNING" in line or "restarted" in line]
    show(
        asked.out, [*shown(losses), "", *table, "", *(f"- {name}: {value}" for name, value in about.items()), "", *log]
    )
    return 0 if told["holds"] and code == 128 + signal.SIGTERM else 1


def _lost(run: BackgroundRun, moment: str, asked: argparse.Namespace) -> Loss:
    """Wait for some steps, let a rank die or hang, and return once the trainer is back."""
    num_rows = len(run.rows())
    run.wait(f"{asked.steps} steps", lambda: len(run.rows()) >= num_rows + asked.steps)
    engines, num_lost, num_back = _engines(run), _count(run, LOST), _count(run, BACK)
    if moment == UPDATE:
        holds.arm(asked.out / "hold", holds.UPDATE)
        run.wait("an update", lambda: holds.is_reached(asked.out / "hold"))
    before, began = run.rows(), time.monotonic()
    rank = run.processes(RANK)[0]
    rank.suspend() if moment == HANG else rank.kill()
    holds.release(asked.out / "hold")
    run.wait("the loss was noticed", lambda: _count(run, LOST) > num_lost)
    noticed_s = time.monotonic() - began
    run.wait("the trainer was back", lambda: _count(run, BACK) > num_back)
    run.wait("a step", lambda: len(run.rows()) > len(before))
    steps_again, away_s = next(match.groups() for line in reversed(run.log()) if (match := re.search(BACK, line)))
    steps = before[-asked.steps :]
    return Loss(
        moment=moment,
        noticed_s=noticed_s,
        away_s=float(away_s),
        steps_again=int(steps_again),
        tokens_before=int(before[-1]["tokens/generated"]),
        tokens_after=int(run.rows()[len(before)]["tokens/generated"]),
        step_s=sum(row["time/step_s"] for row in steps) / len(steps),
        are_engines_same=engines <= _engines(run),
    )


def _engines(run: BackgroundRun) -> set[int]:
    return {process.pid for text in ENGINE for process in run.processes(text)}


def _count(run: BackgroundRun, pattern: str) -> int:
    return sum(re.search(pattern, line) is not None for line in run.log())


def shown(losses: Sequence[Loss]) -> list[str]:
    """The table of losses."""
    lines = ["| moment | noticed after, s | without a trainer, s | a step before, s | steps trained again "]
    lines[0] += "| tokens generated until the next step | same engines |"
    lines.append("|---|--:|--:|--:|--:|--:|---|")
    for loss in losses:
        cells: tuple[object, ...] = (
            loss.moment,
            f"{loss.noticed_s:.1f}",
            f"{loss.away_s:.1f}",
            f"{loss.step_s:.2f}",
            loss.steps_again,
        )
        lines.append(
            f"| {' | '.join(map(str, (*cells, loss.tokens_after - loss.tokens_before, loss.are_engines_same)))} |"
        )
    return lines


def found(rows: list[dict[str, Any]], losses: Sequence[Loss], staleness: int) -> dict[str, Any]:
    """Figures of the whole run.

    ``holds``: every prompt and token is accounted for, none was lost or generated again, and no engine was restarted.
    """
    told, are_held = accounts(rows)
    last = rows[-1]
    wasted = {fate: last[f"tokens/{fate}"] for fate in ("lost", "failed", "stale")}
    told |= {
        "tokens lost, failed, stale": ", ".join(map(str, wasted.values())),
        "tokens trained": last["tokens/trained"],
        "restarts": last["trainer/restarts"],
        "s without training, in all": round(last["time/without_training_s"], 1),
        "log-probs of engine and trainer apart, mean of the first and of the last steps": _differences(rows),
    }
    told["holds"] = (
        are_held
        and not any(wasted.values())
        and told["lag, most"] <= staleness
        and last["trainer/restarts"] == len(losses)
        and all(loss.are_engines_same for loss in losses)
    )
    return told


def _differences(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean of the measured differences of log-probs, in the first and in the last five steps that have one."""
    measured = [row["train/logprob_diff"] for row in rows if "train/logprob_diff" in row]
    return ", ".join(f"{sum(some) / len(some):.2e}" for some in (measured[:5], measured[-5:]) if some)


def _flags(asked: argparse.Namespace) -> dict[str, object]:
    return {
        "rollout-num-gpus": 1,
        "save": asked.out / "saved",
        "save-interval": asked.save_interval,
        "keep-checkpoints": 2,
        **DEADLINES,
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("lost_trainer", __doc__)
    add_options(parser, "lost_trainer")
    add_option(parser, "--steps", int, "steps before each death, and after the last one", 5)
    add_option(parser, "--save-interval", int, "steps between two checkpoints", 20)
    parser.add_argument(
        "--kill", nargs="+", choices=MOMENTS, default=list(MOMENTS), help="moments of the deaths, in their order"
    )
    asked = parser.parse_args(argv)
    asked.out = asked.out.absolute()
    return asked


if __name__ == "__main__":
    leave_in_order()
    sys.exit(main(sys.argv[1:]))
