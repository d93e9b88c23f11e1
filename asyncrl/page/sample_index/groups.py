"""Lists of groups, from the index."""

from dataclasses import dataclass
from typing import Any

import duckdb

from asyncrl.page.sample_index.filters import SORTS, Filter

GROUPS_PER_PAGE = 50
type Key = tuple[int, int]
"""Step and id of a group; after a resumption, another step may have the same id."""

_ALL = "SELECT *, size AS chosen FROM groups WHERE {of_groups} {spread}"
_CHOSEN = """
SELECT groups.*, chosen FROM groups JOIN (
    SELECT step, group_id, count(*) AS chosen FROM {source} WHERE {of_groups} AND {of_samples} GROUP BY step, group_id
) USING (step, group_id)
WHERE true {spread}
"""
_FOUND = """(
    SELECT samples.*, found.sample IS NOT NULL AS is_found
    FROM samples LEFT JOIN found USING (step, group_id, sample)
)"""
_SPREADS = {"with": "AND reward_max > reward_min", "without": "AND reward_max = reward_min", "": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group in a list."""

    step: int
    group_id: int
    prompt_row: int
    size: int
    chosen: int
    """Samples that the filter chooses."""
    reward_mean: float
    reward_min: float
    reward_max: float
    reward_std: float
    length_mean: float
    length_max: int
    stopped: int
    cut: int
    others: int
    lag_max: int | None
    """None if no token of the group is in the loss."""
    logprob_diff: float | None
    """Mean difference of the trainer's log-probs from the engine's; None if unknown."""
    seconds_max: float
    total: int
    """Groups in the whole list."""
    prompt: str
    """The beginning of the prompt."""


class GroupLists:
    """Lists of groups under one filter.  ``found`` has the samples with the filter's text, as pyarrow's table."""

    def __init__(self, database: duckdb.DuckDBPyConnection, chosen: Filter, found: Any = None) -> None:
        self._database = database
        source = "(SELECT *, false AS is_found FROM samples)" if found is None else _FOUND
        sql = _CHOSEN if chosen.chooses_samples else _ALL
        if found is not None:
            database.register("found", found)
        row = '"row"' if chosen.chooses_samples else "prompt_row"
        of_groups, values = chosen.of_groups(row)
        of_samples, more = chosen.of_samples()
        names = {"source": source, "of_groups": of_groups, "of_samples": of_samples}
        self._groups = sql.format(**names, spread=_SPREADS[chosen.spread])
        self._values = values | more
        direction = "DESC" if chosen.descending else "ASC"
        self._order = f"{SORTS[chosen.sort]} {direction} NULLS LAST, step {direction}, group_id"

    def page(self, number: int) -> list[Group]:
        """Return a page of the list, from 0."""
        sql = f"""
        SELECT *, count(*) OVER () AS total FROM ({self._groups})
        ORDER BY {self._order} LIMIT {GROUPS_PER_PAGE} OFFSET {number * GROUPS_PER_PAGE}
        """
        found = self._database.execute(sql, self._values)
        names = [column[0] for column in found.description or ()]
        return [Group(**dict(zip(names, row, strict=True))) for row in found.fetchall()]

    def around(self, key: Key) -> tuple[Key | None, Key | None]:
        """Return the groups before and after one in the list; None where there is none."""
        sql = f"""
        SELECT before, after FROM (
            SELECT step, group_id, lag((step, group_id)) OVER list AS before, lead((step, group_id)) OVER list AS after
            FROM ({self._groups}) WINDOW list AS (ORDER BY {self._order})
        ) WHERE step = $step AND group_id = $group_id
        """
        row = self._database.execute(sql, self._values | {"step": key[0], "group_id": key[1]}).fetchone()
        return (row[0], row[1]) if row else (None, None)
