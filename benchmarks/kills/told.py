"""The line of a life in lives.jsonl, and the tables of a campaign."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from benchmarks.chaos.accounts import BROKEN, Figures
from benchmarks.kills.checks import Kept
from benchmarks.kills.lengths import Comparison


@dataclass(slots=True, kw_only=True)
class Blow:
    """A kill that happened."""

    process: str
    moment: str
    steps: int
    """Steps done before it, as far as metrics.jsonl of the attempt has them."""
    at: float
    """Seconds since 1970."""
    mark: Mapping[int, int]
    """Bytes of the journal's segments."""
    next_step_s: float | None = None
    """Seconds to the next row of metrics.jsonl, also of a resumed run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One line of lives.jsonl."""

    life: int
    seed: int
    victim: str | None
    variant: str
    num_engines: int
    codes: tuple[int | None, ...]
    """Exit codes of the attempts, in order."""
    kills: tuple[dict[str, Any], ...]
    seconds: float
    figures: Figures
    kept: Kept
    weights: str
    """SHA-256 of the final weights; empty if there are none."""
    has_same_weights: bool | None = None
    """Whether they are those of the unkilled run; None if they need not be, or it is that run."""
    first_other_step: int | None = None
    """First step whose groups or tokens differ from the unkilled run's; None: no step."""
    said: str = ""
    verdict: str
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def is_broken(self) -> bool:
        """Whether a check failed."""
        return self.verdict.startswith(BROKEN)

    def as_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        return asdict(self)


COLUMNS = (
    *("life", "victim", "variant", "engines", "kills (moment, steps done)", "exit codes", "s", "tokens lost"),
    *("finished at kills", "in flight at kills", "weights", "verdict"),
)
SUMMARY = (
    *("victim", "variant", "lives", "kills", "s per kill", "s to the next step, median", "longest"),
    *("tokens lost per kill", "BROKEN"),
)
LENGTHS = (*("variant", "answers", "answers started", "trained", "mean started", "trained", "distance", "p"),)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table with a row for each life."""
    return _markdown(COLUMNS, map(_cells, rows))


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    kills = (f"{kill['process']} ({kill['moment']}, {kill['steps']})" for kill in row["kills"])
    same = {None: "", True: "same", False: "other"}[row["has_same_weights"]]
    first = row["first_other_step"]
    return (
        *(row["life"], row["victim"], row["variant"], row["num_engines"], ", ".join(kills)),
        ", ".join("killed" if code is None else str(code) for code in row["codes"]),
        f"{row['seconds']:.0f}",
        row["figures"]["tokens_lost"],
        f"{row['kept']['num_finished']} ({row['kept']['num_compared']} compared)",
        row["kept"]["num_in_flight"],
        same if first is None else f"{same}, first other step {first}",
        row["verdict"].replace("|", "\\|"),
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of the kills by victim and variant, with totals."""
    by_case: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        for case in ((row["victim"], row["variant"]), (row["victim"], "all"), ("~all", "all")):
            by_case[case].append(row)
    return _markdown(SUMMARY, (_summed(*case, found) for case, found in sorted(by_case.items())))


def _summed(victim: str, variant: str, rows: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
    kills = [kill for row in rows for kill in row["kills"]]
    after = [kill["next_step_s"] for kill in kills if kill["next_step_s"] is not None]
    lost = sum(row["figures"]["tokens_lost"] for row in rows)
    return (
        *(victim.lstrip("~"), variant, len(rows), len(kills)),
        f"{sum(row['seconds'] for row in rows) / len(kills):.0f}" if kills else "",
        f"{median(after):.1f}" if after else "",
        f"{max(after):.1f}" if after else "",
        f"{lost / len(kills):.0f}" if kills else "",
        sum(row["verdict"].startswith(BROKEN) for row in rows),
    )


def compared_table(found: Iterable[tuple[str, str, Comparison | None]]) -> list[str]:
    """Return the lines of a table of comparisons, each with its variant and its answers."""
    cells = []
    for variant, answers, result in found:
        if result is not None:
            means = (f"{each:.2f}" for each in result.means)
            cells.append((variant, answers, *result.num_answers, *means, f"{result.distance:.4f}", f"{result.p:.3f}"))
    return _markdown(LENGTHS, cells)


def totals(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line with the kills and the checks of all lives."""
    num_kills = sum(len(row["kills"]) for row in rows)
    finished = sum(row["kept"]["num_finished"] for row in rows)
    broken = sum(row["verdict"].startswith(BROKEN) for row in rows)
    per_kill = mean([row["seconds"] for row in rows]) * len(rows) / num_kills if num_kills else 0.0
    return (
        f"{num_kills} kills in {len(rows)} lives, {per_kill:.0f} s each: {broken} lives BROKEN; "
        f"{finished} finished groups were there at the kills"
    )


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(map(str, cells))} |" for cells in rows]
