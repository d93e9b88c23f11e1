"""The quarantine: rows whose groups failed.  A row that fails too often is left out."""

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncrl.errors import AsyncRLError, FailureBudgetSpent, RewardKeyMissing, SampleFailed
from asyncrl.plain_text import encodable
from asyncrl.types import Prompt

logger = logging.getLogger(__name__)

QUOTED = 300
"""Characters of a reason or a prompt that are kept, at most."""
ANY_ROW = -1
"""The number of all rows that are known by their content alone."""


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
        *,
        by_content: bool = False,
    ) -> None:
        """``rows`` are those of earlier runs.  ``write`` is called with every row that changes; 0 forgets all rows.

        With ``by_content``, prompts of equal tokens and label are one row: a user's data source gives every prompt a
        new number.
        """
        self._most_failures = most_failures
        self._by_content = by_content
        known = [row for row in rows if row.attempts] if most_failures else []
        self._rows = {(ANY_ROW if by_content else row.row, row.digest): row for row in known}
        self._numbers = {row.row for row in known}
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
        _, digest = key = self._key(prompt)
        before = self._rows.get(key)
        attempts = 1 + (before.attempts if before else 0)
        name = prompt.metadata.get("id")
        found = FailedRow(
            row=before.row if before else prompt.row,
            digest=digest,
            id=None if name is None else encodable(str(name)[:QUOTED]),
            text=encodable(prompt.text[:QUOTED]),
            attempts=attempts,
            reason=encodable(str(error)[:QUOTED]),
            is_quarantined=attempts >= self._most_failures,
        )
        self._rows[key] = found
        self._numbers.add(found.row)
        self._write(found)
        if found.is_quarantined:
            logger.warning("row %d failed %d times and is left out from now on: %s", found.row, attempts, found.reason)
        return before is not None

    def succeeded(self, prompt: Prompt) -> None:
        """Forget the failures of a row, because its group was scored."""
        if self._may_be_known(prompt) and (known := self._rows.pop(self._key(prompt), None)) is not None:
            self._write(FailedRow(row=known.row, digest=known.digest))

    def withholds(self, prompt: Prompt) -> bool:
        """Return whether the prompt must not go back to the user's data source, which would give it again."""
        return self._by_content and self._is_quarantined(prompt)

    def leaves_out(self, prompt: Prompt) -> bool:
        """Return whether the prompt's row is in quarantine; called once with each prompt that is taken.

        Raises FailureBudgetSpent if all rows are: within two epochs, each row comes at most twice.
        """
        if not self._is_quarantined(prompt):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row > 2 * len(self._rows):
            known = self._rows[self._key(prompt)]
            raise FailureBudgetSpent(
                f"all rows are in quarantine (max-row-failures {self._most_failures}); the last, row {known.row}: "
                f"{known.reason}"
            )
        return True

    def _is_quarantined(self, prompt: Prompt) -> bool:
        known = self._rows.get(self._key(prompt)) if self._may_be_known(prompt) else None
        return known is not None and known.is_quarantined

    def _may_be_known(self, prompt: Prompt) -> bool:
        """Return quickly whether the prompt's row may have failed."""
        return bool(self._rows) if self._by_content else prompt.row in self._numbers

    def _key(self, prompt: Prompt) -> tuple[int, str]:
        content = ",".join(map(str, prompt.token_ids))
        if self._by_content:
            content += f" {prompt.label!r}"
        digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return ANY_ROW if self._by_content else prompt.row, digest
