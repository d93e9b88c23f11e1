"""The cost of the controller: CPU time per sample, lag of its loop and samples/s, against servers that cost nothing.

    uv run python -m benchmarks.controller                          answers of 1,000 and of 16,000 tokens
    uv run python -m benchmarks.controller --intervals 16 64 256 1000 --tokens 1000 --in-flight 1024
    uv run python -m benchmarks.controller --tokens-per-s 1e8       as fast as the controller can
    uv run python -m benchmarks.controller --plain                  against SGLang without our plug-in
    uv run python -m benchmarks.controller --profile                with shares of the CPU time by package
    uv run python -m benchmarks.controller --against ../other       alternately with another checkout
    uv run python -m benchmarks.controller --check                  exit code 1 if a limit is exceeded

``--check`` adds one case that must meet both limits in the same run: 1,024 requests in flight, answers of 1,000 tokens,
1,000 samples/s.  That is a million tokens/s, as many as some hundred GPUs generate: a large run.  At a lower rate each
sample costs more, because every event wakes an idle core.  At full speed all answers wait for each other, and the lag
means nothing.

Each case runs in a separate process.  Times depend on what else the machine does: on a busy one, other programs cause
most of the lag, as the column ``starved`` shows.
"""

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from asyncrl.engines.sglang.launch import STREAM_INTERVAL
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.controller.case import Case, CaseMeasurement

CHECKED: dict[str, Any] = {"num_tokens": 1000, "in_flight": 1024, "interval": STREAM_INTERVAL, "tokens_per_s": 1e6}
"""The case of ``--check``."""
MIN_PACE = 0.95
"""Least share of the servers' tokens/s that must arrive.  Below it everything waits for the controller.  Samples
are counted to some percent in ten seconds."""
MAX_CPU_MS = 0.5
"""Most milliseconds of CPU time per sample.  One run must meet this limit and the next."""
MAX_LAG_P99_MS = 20.0
WARMUP_S = 4.0
"""Seconds to open up to 4,096 connections one by one, and to handle what they send at once."""
ROOT = Path(__file__).parents[2]
CASE = Path("benchmarks", "controller", "case.py")
"""The program that runs one case, in any checkout.  Each checkout runs its copy; only the JSON must fit."""


def main(argv: Sequence[str]) -> int:
    """Measure what ``argv`` asks for, show it, write it and check it; returns the exit code."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.check and asked.profile:
        parser.error("--check cannot be combined with --profile, which adds to the times")
    if asked.against and not (asked.against / CASE).is_file():
        parser.error(f"--against {asked.against}: no {CASE} there; a checkout without it is too old to compare with")
    console = Console(width=150)
    rows: list[dict[str, Any]] = []
    for case in [*cases(asked), *checked(asked)]:
        for tree in [ROOT, *([asked.against.resolve()] if asked.against else [])]:
            rows.append({"tree": tree.name, "case": asdict(case), "measured": []})
        for _, row in itertools.product(range(asked.repeats), rows[-2:] if asked.against else rows[-1:]):
            row["measured"].append(asdict(run(case, ROOT if row["tree"] == ROOT.name else asked.against.resolve())))
        console.print(
            f"[dim]{case.num_tokens} tokens, {case.in_flight} in flight, interval {case.interval}, "
            f"{case.tokens_per_s:g} tokens/s: done"
        )
    console.print(table(rows))
    if asked.profile:
        console.print(profile_table(rows))
    if asked.out is not None:
        about = circumstances("controller", argv)
        asked.out.write_bytes(orjson.dumps({**about, "rows": rows}, option=orjson.OPT_INDENT_2))
    problems = too_much(rows) if asked.check else []
    for problem in problems:
        console.print(f"[red]{problem}")
    return 1 if problems else 0


def cases(asked: argparse.Namespace) -> list[Case]:
    """One case for each combination of tokens, interval and requests in flight."""
    return [
        Case(
            num_tokens=num_tokens,
            in_flight=in_flight,
            interval=interval,
            tokens_per_s=asked.tokens_per_s,
            warmup_s=WARMUP_S,
            measured_s=asked.seconds,
            num_servers=asked.servers,
            is_plain=asked.plain,
            is_profiled=asked.profile,
            is_gc_tuned=not asked.stock_gc,
        )
        for num_tokens in asked.tokens
        for interval in asked.intervals
        for in_flight in asked.in_flight
    ]


def checked(asked: argparse.Namespace) -> list[Case]:
    """The case of ``--check``, unless it is among ``cases`` already."""
    asked_for = cases(asked)
    case = replace(asked_for[0], **CHECKED, is_plain=False, is_gc_tuned=True)
    return [case] if asked.check and case not in asked_for else []


def run(case: Case, tree: Path) -> CaseMeasurement:
    """Run the case in a process, with the asyncrl and the case program of ``tree``.  Raises CalledProcessError."""
    inherited = os.environ.get("PYTHONPATH")
    paths = (str(tree), *([inherited] if inherited else []))
    done = subprocess.run(
        (sys.executable, str(tree / CASE), orjson.dumps(asdict(case)).decode()),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return CaseMeasurement(**orjson.loads(done.stdout))


def best(row: Mapping[str, Any]) -> dict[str, Any]:
    """The least disturbed repetition: the one with the least CPU time per sample."""
    return min(row["measured"], key=cpu_ms)


def cpu_ms(measured: Mapping[str, Any]) -> float:
    """Milliseconds of CPU time per sample."""
    return 1000 * float(measured["cpu_s"]) / max(float(measured["samples"]), 1e-9)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of all cases, one per line."""
    shown = Table(title="the controller, per sample and as a whole")
    names = (
        "tokens",
        "in flight",
        "interval",
        "asyncrl",
        "tokens/s",
        "CPU ms/sample",
        "of it GC",
        "samples/s",
        "busy",
        "starved",
    )
    for name in (*names, "lag p50 ms", "p99", "max", "MiB"):
        shown.add_column(name, justify="right")
    for row in rows:
        case, found = row["case"], best(row)
        shown.add_row(
            f"{case['num_tokens']:,}",
            f"{case['in_flight']:,}",
            f"{case['interval']:,}",
            row["tree"],
            f"{case['tokens_per_s']:g}",
            f"{cpu_ms(found):.3f}",
            f"{1000 * found['gc_s'] / max(found['samples'], 1e-9):.3f}",
            f"{found['samples'] / found['seconds']:,.1f}",
            f"{found['cpu_s'] / found['seconds']:.0%}",
            f"{found['starved_s'] / found['seconds']:.0%}",
            f"{found['lag_p50_ms']:.1f}",
            f"{found['lag_p99_ms']:.1f}",
            f"{found['lag_max_ms']:.1f}",
            f"{found['peak_mib']:,.0f}",
        )
    return shown


def profile_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of the shares of CPU time.  The profiler slows Python code down, but not compiled code."""
    shown = Table(title="shares of CPU time, under a profiler")
    rooms = list(dict.fromkeys(room for row in rows for room in best(row)["shares"]))
    for name in ("tokens", "in flight", "interval", "asyncrl", *rooms):
        shown.add_column(name, justify="right")
    for row in rows:
        case, found = row["case"], best(row)["shares"]
        who = (f"{case['num_tokens']:,}", f"{case['in_flight']:,}", f"{case['interval']:,}", row["tree"])
        shown.add_row(*who, *(f"{found.get(room, 0.0):.0%}" for room in rooms))
    return shown


def too_much(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each limit that this checkout exceeds.  A single run must meet all of them."""
    looked_at = [row for row in rows if row["tree"] == ROOT.name and CHECKED.items() <= {**row["case"]}.items()]
    if not looked_at:
        return [f"--check needs a measured case with {CHECKED}"]
    problems = []
    for found in map(best, looked_at):
        spent, late = cpu_ms(found), float(found["lag_p99_ms"])
        pace = found["samples"] / found["seconds"] * CHECKED["num_tokens"] / CHECKED["tokens_per_s"]
        if spent > MAX_CPU_MS:
            problems.append(f"{spent:.3f} ms of CPU time per sample, the limit is {MAX_CPU_MS}")
        if late > MAX_LAG_P99_MS:
            problems.append(f"the lag at p99 is {late:.1f} ms, the limit is {MAX_LAG_P99_MS:g}")
        if pace < MIN_PACE:
            problems.append(f"{pace:.0%} of {CHECKED['tokens_per_s']:g} tokens/s arrive, at least {MIN_PACE:.0%} must")
    return problems


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("controller", __doc__)
    add_option(parser, "--tokens", int, "tokens per answer", [1000, 16_000], nargs="+")
    add_option(parser, "--in-flight", int, "requests in flight", [256, 1024, 4096], nargs="+")
    add_option(parser, "--intervals", int, "tokens per streamed event", [STREAM_INTERVAL], nargs="+")
    add_option(parser, "--tokens-per-s", float, "tokens per second of all servers together", 400_000)
    add_option(parser, "--seconds", float, "measured seconds, after the warm-up", 10.0)
    add_option(parser, "--servers", int, "server processes", 2)
    add_option(parser, "--repeats", int, "runs of each case; the least disturbed one is shown", 1)
    add_option(parser, "--against", Path, "another checkout, measured alternately with this one")
    parser.add_argument("--plain", action="store_true", help="answers of SGLang without our plug-in")
    parser.add_argument("--profile", action="store_true", help="shares of the CPU time by package")
    parser.add_argument("--stock-gc", action="store_true", help="Python's default settings of the garbage collector")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    add_option(parser, "--out", Path, "JSON file for all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
