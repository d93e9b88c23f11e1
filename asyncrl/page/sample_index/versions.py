"""The versions that wrote the trained tokens of each step, from the index."""

from dataclasses import dataclass

import duckdb

MOST_LAGS = 12
"""Lags with an area of their own in a figure; larger ones are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagShare:
    """Trained tokens of some consecutive steps with one lag."""

    step: int
    """The first of the steps."""
    lag: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionShare:
    """Trained tokens of one step that one version wrote."""

    step: int
    version: int
    lag: int
    share: float
    """Part of the step's trained tokens."""


def by_lag(database: duckdb.DuckDBPyConnection, most_points: int) -> list[LagShare]:
    """Return the trained tokens by lag over all steps, as the sums of at most about ``most_points`` stretches."""
    sql = f"""
    WITH ends AS (
        SELECT min(step) AS first, (max(step) - min(step) + $most) // $most AS width FROM versions
    )
    SELECT first + (step - first) // width * width AS start, least(lag, {MOST_LAGS}) AS capped, sum(tokens)
    FROM versions, ends GROUP BY ALL ORDER BY start, capped
    """
    rows = database.execute(sql, {"most": most_points}).fetchall()
    return [LagShare(step=step, lag=lag, tokens=int(tokens)) for step, lag, tokens in rows]


def between(database: duckdb.DuckDBPyConnection, first: int, last: int) -> list[VersionShare]:
    """Return the share of each version in each step from ``first`` to ``last``."""
    sql = """
    SELECT step, version, lag, tokens / sum(tokens) OVER (PARTITION BY step) FROM versions
    WHERE step BETWEEN $first AND $last ORDER BY step, version
    """
    rows = database.execute(sql, {"first": first, "last": last}).fetchall()
    return [VersionShare(step=step, version=version, lag=lag, share=share) for step, version, lag, share in rows]
