"""The quarantine: rows whose groups failed.  A row that fails too often is left out."""

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncrl.errors import AsyncRLError, FailureBudgetSpent, RewardKeyMissing, SampleFailed
from asyncrl.types import Prompt

logger = logging.getLogger(__name__)

QUOTED = 300
"""Characters of a reason or a prompt that are kept, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A row of the prompts, with its failures since its group last succeeded."""

    row: int
    digest: str
    """Digest of the prompt's tokens: another prompt with the same number is another row."""
    id: str | None = None
    """The ``id`` in the row's metadata, if there is one."""
    text: str = ""
    """The beginning of the prompt."""
    attempts: int = 0
    """Groups that failed, over all epochs and resumed runs; 0: the row has succeeded since."""
    reason: str = ""
    """The last failure."""
    is_quarantined: bool = False


class Quarantine:
    """The rows that failed.  A row with ``most_failures`` failures is left out from then on."""

    def __init__(
        self,
        most_failures: int = 0,
        rows: Iterable[FailedRow] = (),
        write: Callable[[FailedRow], None] = lambda row: None,
    ) -> None:
        """``rows`` are those of earlier runs.  ``write`` is called with every row that changes; 0 forgets all rows."""
        self._most_failures = most_failures
        self._rows = {(row.row, row.digest): row for row in rows if row.attempts} if most_failures else {}
        self._numbers = {row.row for row in self._rows.values()}
        self._write = write
        self._in_a_row = 0

    @property
    def num_left_out(self) -> int:
        """Number of rows in quarantine."""
        return sum(row.is_quarantined for row in self._rows.values())

    def failed(self, prompt: Prompt, error: AsyncRLError) -> bool:
        """Record a failure of a row's group.  Returns whether the row failed before, also in an earlier run.

        A failure of the engines, or a missing flag, says nothing about the row and is not recorded.
        """
        if not self._most_failures or isinstance(error, SampleFailed | RewardKeyMissing):
            return False
        before = self._rows.get(_key(prompt))
        attempts = 1 + (before.attempts if before else 0)
        found = _failed_row(prompt, attempts, str(error), is_quarantined=attempts >= self._most_failures)
        self._keep(found)
        if found.is_quarantined:
            logger.warning("row %d failed %d times and is left out from now on: %s", found.row, attempts, found.reason)
        return before is not None

    def succeeded(self, prompt: Prompt) -> None:
        """Forget the failures of a row, because its group was scored."""
        if prompt.row in self._numbers and (known := self._rows.pop(_key(prompt), None)) is not None:
            self._write(FailedRow(row=known.row, digest=known.digest))

    def leaves_out(self, prompt: Prompt) -> bool:
        """Return whether the prompt's row is in quarantine; called once with each prompt that is taken.

        Raises FailureBudgetSpent if all rows are: within two epochs, each row comes at most twice.
        """
        known = self._rows.get(_key(prompt)) if prompt.row in self._numbers else None
        if known is None or not known.is_quarantined:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row > 2 * len(self._rows):
            raise FailureBudgetSpent(
                f"all rows are in quarantine (max-row-failures {self._most_failures}); the last, row {known.row}: "
                f"{known.reason}"
            )
        return True

    def _keep(self, row: FailedRow) -> None:
        self._rows[row.row, row.digest] = row
        self._numbers.add(row.row)
        self._write(row)


def _failed_row(prompt: Prompt, attempts: int, reason: str, *, is_quarantined: bool) -> FailedRow:
    row, digest = _key(prompt)
    name = prompt.metadata.get("id")
    return FailedRow(
        row=row,
        digest=digest,
        id=None if name is None else str(name)[:QUOTED],
        text=prompt.text[:QUOTED],
        attempts=attempts,
        reason=reason[:QUOTED],
        is_quarantined=is_quarantined,
    )


def _key(prompt: Prompt) -> tuple[int, str]:
    tokens = ",".join(map(str, prompt.token_ids)).encode()
    return prompt.row, hashlib.blake2b(tokens, digest_size=8).hexdigest()
