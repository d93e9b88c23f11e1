"""The cost of the gateway: CPU time per turn and lag of its loop, with turns that cost nothing and real sockets.

    uv run python -m benchmarks.gateway                       all three APIs, 1,024 requests in flight
    uv run python -m benchmarks.gateway --api chat --turns 30
    uv run python -m benchmarks.gateway --check               exit code 1 if a turn costs more than 1 ms

``--check`` looks at the highest rate: 1,000 turns/s by default, which are 200,000 tokens/s.  At a lower rate each turn
costs more, because every event wakes an idle core, which is dear on virtual machines.

Each client always has a request in progress.  Its episodes have ``--turns`` turns, in which the context grows by the
answer and by an observation of about 90 tokens.  Each case runs in a separate process, and its clients in another.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.gateway.case import Case, GatewayMeasurement

APIS = ("generate", "chat", "messages")
MAX_CPU_MS = 1.0
"""Most milliseconds of CPU time per turn, at the highest rate."""
WARMUP_S = 8.0
"""Seconds until the first episodes, which are of all lengths, are over for most clients."""
ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str]) -> int:
    """Measure what ``argv`` asks for, show it, write it and check it; returns the exit code."""
    parser = parser_of("gateway", __doc__)
    add_option(parser, "--api", str, "APIs of the clients", list(APIS), nargs="+", choices=APIS)
    add_option(parser, "--in-flight", int, "clients, each with a request in progress", 1024)
    add_option(parser, "--turns", int, "turns per episode", 10)
    add_option(parser, "--tokens", int, "tokens per answer", 200)
    add_option(parser, "--turns-per-s", float, "turns per second of all engines together", [400.0, 1000.0], nargs="+")
    add_option(parser, "--seconds", float, "measured seconds, after the warm-up", 10.0)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    add_option(parser, "--out", Path, "JSON file for all figures")
    asked = parser.parse_args(argv)
    rows = []
    for api, turns_per_s in product(asked.api, asked.turns_per_s):
        case = Case(
            api=api,
            in_flight=asked.in_flight,
            num_turns=asked.turns,
            num_tokens=asked.tokens,
            turns_per_s=turns_per_s,
            warmup_s=WARMUP_S,
            measured_s=asked.seconds,
        )
        rows.append({"case": asdict(case), "measured": asdict(run(case))})
    console = Console(width=140)
    console.print(table(rows))
    if asked.out is not None:
        about = circumstances("gateway", argv)
        asked.out.write_bytes(orjson.dumps({**about, "rows": rows}, option=orjson.OPT_INDENT_2))
    problems = too_much(rows) if asked.check else []
    for problem in problems:
        console.print(f"[red]{problem}")
    return 1 if problems else 0


def run(case: Case) -> GatewayMeasurement:
    """Run the case in a process.  Raises CalledProcessError."""
    paths = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        (sys.executable, str(Path(__file__).with_name("case.py")), orjson.dumps(asdict(case)).decode()),
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        check=True,
    )
    return GatewayMeasurement(**orjson.loads(done.stdout))


def cpu_ms(measured: Mapping[str, Any]) -> float:
    """Milliseconds of CPU time per turn."""
    return 1000 * float(measured["cpu_s"]) / max(1, int(measured["turns"]))


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of all cases, one per line."""
    shown = Table(title="the gateway, per turn and as a whole")
    for name in (
        "API",
        "in flight",
        "context",
        "CPU ms/turn",
        "turns/s",
        "busy",
        "starved",
        "lag p50 ms",
        "p99",
        "max",
    ):
        shown.add_column(name, justify="right")
    for row in rows:
        case, found = row["case"], row["measured"]
        shown.add_row(
            case["api"],
            f"{case['in_flight']:,}",
            f"{found['num_context']:,.0f}",
            f"{cpu_ms(found):.3f}",
            f"{found['turns'] / found['seconds']:,.0f}",
            f"{found['cpu_s'] / found['seconds']:.0%}",
            f"{found['starved_s'] / found['seconds']:.0%}",
            f"{found['lag_p50_ms']:.1f}",
            f"{found['lag_p99_ms']:.1f}",
            f"{found['lag_max_ms']:.1f}",
        )
    return shown


def too_much(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each limit that a case exceeds."""
    problems = []
    highest = max((row["case"]["turns_per_s"] for row in rows), default=0.0)
    for row in rows:
        api, found = row["case"]["api"], row["measured"]
        if cpu_ms(found) > MAX_CPU_MS and row["case"]["turns_per_s"] == highest:
            problems.append(f"{api}: {cpu_ms(found):.3f} ms of CPU time per turn, the limit is {MAX_CPU_MS:g}")
        if found["branches"]:
            problems.append(f"{api}: {found['branches']} branches, although no client edits its history")
        if not found["turns"]:
            problems.append(f"{api}: no turns")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
