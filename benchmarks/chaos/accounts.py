"""The accounts of a life: what its attempts trained, lost and counted twice, and the verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.common.endless_run import GROUP_FATES, TOKEN_FATES

TO_THE_END = "trained to the end"
DOCUMENTED = "documented end"
BROKEN = "BROKEN"
SKIPPED = "skipped"
ERROR = "error: "
BUG = "a bug in asyncrl"
DOCUMENTED_CODES = (1, 2)
"""Exit codes of an end that one error line explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The files and processes that one attempt left."""

    code: int | None
    """Exit code; negative for a signal.  None: it made no progress for too long and was killed by the benchmark."""
    said: str
    """The last error line of the output, or else the first warning after the fault."""
    has_traceback: bool
    rows: tuple[Mapping[str, Any], ...]
    """Rows of metrics.jsonl."""
    trained: Mapping[int, tuple[tuple[int, int], ...]]
    """Epoch and row of the prompts of each batch, as a hook saw them before the step."""
    left: tuple[str, ...] = ()
    """Command lines of the processes that ran 15 s after the end."""
    left_s: float = 0.0
    """Seconds from the end of the program to the end of its last process."""
    is_signalled: bool = False
    """Whether the fault itself ended the program by a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The losses of a life."""

    tokens_lost: int
    """Generated and neither trained, filtered nor masked: stale, failed, or in flight at a kill."""
    prompts_lost: int
    """Taken and then neither trained, filtered, failed nor outstanding."""
    prompts_failed: int
    prompts_twice: int
    """Trained more than once in steps that count."""
    steps_changed: int
    """Steps that a resumed run trained again with other prompts: finished groups were lost."""
    is_balanced: bool
    """Whether tokens and groups add up in every row and in the last checkpoint."""


def figures(attempts: Sequence[Attempt], state: Mapping[str, Any] | None) -> Figures:
    """Return what was lost; ``state`` is the run's state in its last checkpoint, None without one."""
    counted = Counter(row for rows in _that_count(attempts).values() for row in rows)
    rows = [row for attempt in attempts for row in attempt.rows]
    is_balanced = all(_is_balanced(row) for row in rows)
    if state is None:
        lost, failed = 0, rows[-1]["groups/failed"] if rows else 0
    else:
        groups, tokens = state["groups"], state["tokens"]
        failed = groups["failed"]
        settled = len(counted) + groups["filtered"] + failed + len(state["outstanding"])
        lost = state["prompts_taken"] - settled
        is_balanced &= groups["admitted"] == sum(groups[fate] for fate in GROUP_FATES)
        is_balanced &= tokens["generated"] == sum(tokens[fate] for fate in TOKEN_FATES)
    return Figures(
        tokens_lost=_tokens_lost(attempts),
        prompts_lost=lost,
        prompts_failed=failed,
        prompts_twice=sum(counted.values()) - len(counted),
        steps_changed=_steps_changed(attempts),
        is_balanced=is_balanced,
    )


def _that_count(attempts: Sequence[Attempt]) -> dict[int, tuple[tuple[int, int], ...]]:
    """The prompts of each step; a step that was trained again after a resume counts as trained last."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for attempt in attempts:
        if attempt.trained:
            first = min(attempt.trained)
            found = {step: rows for step, rows in found.items() if step < first} | dict(attempt.trained)
    return found


def _steps_changed(attempts: Sequence[Attempt]) -> int:
    """Count the steps of metrics.jsonl that a later attempt trained with other prompts."""
    known: dict[int, tuple[tuple[int, int], ...]] = {}
    changed = 0
    for attempt in attempts:
        changed += sum(known.get(step, rows) != rows for step, rows in attempt.trained.items())
        done = {row["step"] for row in attempt.rows}
        known |= {step: rows for step, rows in attempt.trained.items() if step in done}
    return changed


def _tokens_lost(attempts: Sequence[Attempt]) -> int:
    """Tokens that were in flight when an attempt ended, or stale or failed at the end."""
    told = [attempt.rows[-1] for attempt in attempts if attempt.rows]
    return int(sum(told[-1][f"tokens/{name}"] for name in ("lost", "stale", "failed"))) if told else 0


def _is_balanced(row: Mapping[str, Any]) -> bool:
    return bool(
        row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in TOKEN_FATES)
        and row["groups/admitted"] == sum(row[f"groups/{fate}"] for fate in GROUP_FATES)
    )


def verdict(
    attempts: Sequence[Attempt], found: Figures, *, num_steps: int, may_fail: bool, must_continue: bool = False
) -> str:
    """Return TO_THE_END, DOCUMENTED, or BROKEN with all reasons.

    ``may_fail``: the fault is one of the rewards, which costs groups by design.  ``must_continue``: the fault must not
    end the run.
    """
    why = [reason for attempt in attempts for reason in _reasons(attempt)]
    if must_continue and attempts[0].code not in (0, None):
        why.append("the fault ended the run")
    last = attempts[-1]
    done = sorted({row["step"] for attempt in attempts for row in attempt.rows})
    if last.code != 0:
        why.append(f"not trained to the end after {len(attempts)} attempts")
    elif done[-1:] != [num_steps - 1]:
        why.append(f"exit code 0 after step {done[-1] if done else None} of {num_steps}")
    if found.prompts_lost:
        why.append(f"{found.prompts_lost} prompts lost")
    if found.prompts_twice:
        why.append(f"{found.prompts_twice} prompts counted twice")
    if found.steps_changed:
        why.append(f"{found.steps_changed} steps trained again with other prompts")
    if found.prompts_failed and not may_fail:
        why.append(f"{found.prompts_failed} groups failed")
    if not found.is_balanced:
        why.append("the accounts do not add up")
    if why:
        return f"{BROKEN}: {'; '.join(dict.fromkeys(why))}"
    return DOCUMENTED if any(attempt.code in DOCUMENTED_CODES for attempt in attempts) else TO_THE_END


def _reasons(attempt: Attempt) -> list[str]:
    """Return what is wrong with the end of one attempt."""
    why = []
    if attempt.code is None:
        why.append("hung")
    elif attempt.code in DOCUMENTED_CODES and not attempt.said.startswith(ERROR):
        why.append(f"exit code {attempt.code} without an error line")
    elif attempt.code != 0 and attempt.code not in DOCUMENTED_CODES and not attempt.is_signalled:
        why.append(f"exit code {attempt.code}")
    if BUG in attempt.said:
        why.append("an error without a name")
    if attempt.has_traceback:
        why.append("a traceback in the output")
    if attempt.left:
        why.append(f"{len(attempt.left)} processes left ({', '.join(sorted(set(attempt.left)))})")
    return why


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One row of the table."""

    life: int
    seed: int
    fault: str
    moment: str
    codes: tuple[int | None, ...] = ()
    """Exit codes of the attempts, in order."""
    said: str = ""
    next_step_s: float | None = None
    """Seconds from the fault to the next trained step, also of a resumed run; None if there was none."""
    figures: Figures | None = None
    left: int = 0
    left_s: float = 0.0
    """Most seconds from the end of a program to the end of its last process."""
    seconds: float = 0.0
    verdict: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def is_broken(self) -> bool:
        """Whether the life did not end as it should."""
        return self.verdict.startswith(BROKEN)

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


COLUMNS = (
    *("life", "fault", "moment", "exit codes", "said", "s to next step", "tokens lost", "prompts lost", "twice"),
    *("processes left", "verdict"),
)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table of the rows ``as_json``."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        lost = row["figures"] or {}
        after = row["next_step_s"]
        cells = (
            row["life"],
            row["fault"],
            row["moment"],
            ", ".join("killed" if code is None else str(code) for code in row["codes"]),
            row["said"].replace("|", "\\|")[:160],
            "" if after is None else f"{after:.1f}",
            lost.get("tokens_lost", ""),
            lost.get("prompts_lost", ""),
            lost.get("prompts_twice", ""),
            f"{row['left']} ({row['left_s']:.1f} s)",
            row["verdict"].replace("|", "\\|"),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line with the number of lives for each verdict."""
    counts = Counter(str(row["verdict"]).partition(":")[0] for row in rows)
    return f"{len(rows)} lives: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())
