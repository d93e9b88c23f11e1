"""The command ``python -m asyncrl.sim.faults``: many lives, or one with its events (docs/fault_simulation.md)."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from asyncrl.sim.faults.hunt import Findings, hunt_together, simulating
from asyncrl.sim.faults.life import live
from asyncrl.sim.faults.planted import table
from asyncrl.sim.faults.shrink import history, shrunk
from asyncrl.sim.faults.world.plan import KINDS, Setting, drawn

MOST_SHRUNK = 3
"""Violations that are shrunk and shown; the others are listed."""
REPORT_S = 10.0
"""Least time between two lines of progress."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if an oracle did not hold."""
    asked = _parser().parse_args(arguments)
    seed = asked.seed if asked.seed is not None else int(time.time())
    if asked.trace:
        return _trace(seed)
    if asked.planted:
        return 0 if table(asked.lives, seed, asked.workers, _say) else 1
    _say(f"lives {seed} to {seed + asked.lives - 1}, {asked.workers} workers")
    start = time.perf_counter()
    found = hunt_together(range(seed, seed + asked.lives), asked.workers, _Progress(), asked.seconds)
    _say(_so_far(found, time.perf_counter() - start))
    _summary(found)
    for bad in sorted(found.violations)[:MOST_SHRUNK]:
        _show(bad, found.violations[bad][0])
    return 1 if found.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl.sim.faults", description="Lives of a run in which anything may fail."
    )
    parser.add_argument("--lives", type=int, default=1000, help="Number of lives (default: 1000).")
    parser.add_argument("--seed", type=int, help="Seed of the first life; the time by default.")
    parser.add_argument("--workers", type=int, default=1, help="Number of processes (default: 1).")
    parser.add_argument("--seconds", type=float, help="Seconds after which no further hundred lives begin.")
    parser.add_argument("--trace", action="store_true", help="Live the life of --seed and print its events.")
    parser.add_argument("--planted", action="store_true", help="Plant known errors and count the lives that find them.")
    return parser


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _Progress:
    """Writes a line now and then."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, found: Findings, seconds: float) -> None:
        """Write a line if the last one is ``REPORT_S`` old."""
        if seconds >= self._next_s:
            self._next_s = seconds + REPORT_S
            _say(_so_far(found, seconds))


def _so_far(found: Findings, seconds: float) -> str:
    rate, per_cpu = found.num_lives / seconds, found.num_lives / max(found.cpu_s, 1e-9)
    speed = f"{rate:.0f} a second ({per_cpu:.0f} per second of a core)"
    seeds = f" {sorted(found.violations)}" if found.violations else ""
    return (
        f"{found.num_lives} lives, {speed}, {found.happened.total()} faults, {len(found.violations)} violations{seeds}"
    )


def _summary(found: Findings) -> None:
    _say(f"{found.num_with_journal} lives had a journal, from which {found.num_recovered} processes recovered")
    _say(f"{found.num_resumed} lives resumed; {found.virtual_s / 3600:.0f} virtual hours")
    _say("ends of processes: " + ", ".join(f"{name} {count}" for name, count in found.ends.most_common()))
    _say("faults that happened:")
    for kind in KINDS:
        _say(f"  {kind:20} {found.happened[kind]}")
    for seed, (_, text) in sorted(found.violations.items()):
        _say(f"seed {seed}: {text}")


def _show(seed: int, oracle: str) -> None:
    setting, faults = drawn(seed)
    with simulating() as scratch:
        left = shrunk(setting, faults, oracle, scratch)
        outcome = history(setting, left, scratch)
    _say(f"\nseed {seed}, with {len(left)} of {len(faults)} faults:")
    _say(f"  {_words(setting)}")
    for line in (*map(str, left), *outcome.lines, str(outcome.violation)):
        _say(f"  {line}")


def _trace(seed: int) -> int:
    setting, faults = drawn(seed)
    with simulating() as scratch:
        outcome = live(setting, faults, scratch, is_traced=True)
    for line in (_words(setting), *map(str, faults), *outcome.lines):
        _say(line)
    _say(f"ends: {', '.join(outcome.ends)}")
    if outcome.violation is not None:
        _say(f"violation: {outcome.violation}")
    return 0 if outcome.violation is None else 1


def _words(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(setting).items())


if __name__ == "__main__":
    sys.exit(main())
