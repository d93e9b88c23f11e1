"""The line of a life: what it left, checked and compared with the run that nothing killed."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import orjson
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from benchmarks.chaos.accounts import BROKEN, Figures, figures, verdict
from benchmarks.kills.checks import Kept, Remains, Step, kept, lengths_trained
from benchmarks.kills.drawn import NUM_STEPS
from benchmarks.kills.history import read
from benchmarks.kills.played import Play
from benchmarks.kills.told import Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results in which lives of one seed and variant are compared."""

    weights: str
    """SHA-256 of the final weights."""
    steps: Mapping[str, str]
    """Digest of each step's groups and tokens."""
    lengths: Mapping[str, list[int]]
    """Lengths of the answers of each trained group."""
    in_flight: list[int]
    """Groups that were in flight at a kill."""
    started: list[int]
    """Groups that were started."""

    def written(self, file: Path) -> None:
        """Write the outcome, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_bytes(orjson.dumps(asdict(self)))
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> "Outcome | None":
        """Return the outcome in a file; None if there is no such file."""
        return cls(**orjson.loads(file.read_bytes())) if file.exists() else None


def judged(play: Play, seconds: float, unkilled: Outcome | None) -> tuple[Told, Outcome]:
    """Check what a life left, and compare it with ``unkilled``."""
    remains = _remains(play)
    outcome = _outcome(play, remains)
    found, checked = figures(play.attempts, play.state()), kept(remains)
    life, has_same = play.life, None
    if unkilled is not None and life.variant.staleness == 0:
        has_same = unkilled.weights == outcome.weights
    told = Told(
        life=life.number,
        seed=life.seed,
        victim=life.victim,
        variant=life.variant.name,
        num_engines=life.num_engines,
        codes=tuple(attempt.code for attempt in play.attempts),
        kills=tuple({name: value for name, value in asdict(blow).items() if name != "mark"} for blow in play.blows),
        seconds=seconds,
        figures=found,
        kept=checked,
        weights=outcome.weights,
        has_same_weights=has_same,
        first_other_step=_first_other(outcome, unkilled) if has_same is not None else None,
        said=next((attempt.said for attempt in play.attempts if attempt.said), ""),
        verdict=_verdict(play, found, checked, has_same_weights=has_same),
        notes=tuple(play.notes),
    )
    return told, outcome


def _verdict(play: Play, found: Figures, checked: Kept, *, has_same_weights: bool | None) -> str:
    must_continue = play.life.victim == "engine"
    end = verdict(play.attempts, found, num_steps=NUM_STEPS, may_fail=False, must_continue=must_continue)
    return judgement(end, checked, has_same_weights=has_same_weights)


def judgement(end: str, checked: Kept, *, has_same_weights: bool | None) -> str:
    """Return the verdict ``end`` of the attempts, or BROKEN with all reasons."""
    why = [end.removeprefix(f"{BROKEN}: ")] if end.startswith(BROKEN) else []
    why += checked.violations()
    if has_same_weights is False:
        why.append("other final weights than without kills")
    return f"{BROKEN}: {'; '.join(why)}" if why else end


def _remains(play: Play) -> Remains:
    history, missing = read(play.segments)
    files = tuple(samples(run_dir / "rollouts") for run_dir in play.run_dirs)
    return Remains(
        num_steps=NUM_STEPS,
        max_staleness=play.life.variant.staleness,
        history=history,
        missing=missing,
        marks=tuple(blow.mark for blow in play.blows),
        files=tuple({step: groups for step, (groups, _) in each.items()} for each in files),
        lags=(
            *(lag for each in files for _, lag in each.values()),
            *(int(row["lag/max"]) for attempt in play.attempts for row in attempt.rows if "lag/max" in row),
        ),
    )


def samples(folder: Path) -> dict[int, tuple[Step, int]]:
    """Return the groups of each step's file in order, and the largest lag in it."""
    found = dict[int, tuple[Step, int]]()
    for file in sorted(folder.glob("step-*.parquet")):
        rows = pq.read_table(file, columns=["step", "group_id", "tokens", "lag"]).to_pylist()
        groups = {
            group_id: tuple(tuple(row["tokens"]) for row in group)
            for group_id, group in groupby(rows, key=lambda row: row["group_id"])
        }
        found[int(rows[0]["step"])] = groups, max((row["lag"] or 0 for row in rows), default=0)
    return found


def _outcome(play: Play, remains: Remains) -> Outcome:
    in_flight = [remains.history.in_flight(mark) for mark in remains.marks]
    return Outcome(
        weights=digest_of_weights(play.run_dirs[-1] / "model"),
        steps={str(step): _digest(groups) for step, groups in sorted(remains.steps.items())},
        lengths={str(group_id): lengths for group_id, lengths in lengths_trained(remains).items()},
        in_flight=sorted(set().union(*in_flight)),
        started=sorted(remains.history.admitted),
    )


def digest_of_weights(folder: Path) -> str:
    """Return the SHA-256 of all files of weights in ``folder``; empty if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else ""


def _digest(groups: Step) -> str:
    return hashlib.sha256(orjson.dumps([[group_id, answers] for group_id, answers in groups.items()])).hexdigest()


def _first_other(outcome: Outcome, unkilled: Outcome | None) -> int | None:
    if unkilled is None:
        return None
    return min(_others(outcome.steps, unkilled.steps), default=None)


def _others(steps: Mapping[str, str], others: Mapping[str, str]) -> Iterator[int]:
    for step, digest in steps.items():
        if others.get(step, digest) != digest:
            yield int(step)
