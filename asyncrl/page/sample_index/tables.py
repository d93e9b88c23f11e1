"""The tables of the index in DuckDB: samples, groups, and the trained tokens of each step by version."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb

PREVIEW = 120
"""Characters of prompt and response that the index has."""
SOURCE_COLUMNS = (
    *("group_id", "sample", "epoch", "row", "reward", "lag", "finish", "seconds", "prompt", "response"),
    *("prompt_tokens", "logprobs", "trainer_logprobs", "loss_mask", "spans", "turns"),
)
"""Columns of a step's file that the index is made of, besides the step."""
SAMPLE_COLUMNS = {
    "step": "INTEGER",
    "group_id": "BIGINT",
    "sample": "INTEGER",
    "epoch": "INTEGER",
    "row": "BIGINT",
    "reward": "DOUBLE",
    "lag": "INTEGER",
    "finish": "VARCHAR",
    "seconds": "DOUBLE",
    "prompt_tokens": "INTEGER",
    "response_tokens": "INTEGER",
    "trained_tokens": "INTEGER",
    "turns": "INTEGER",
    "logprob_diff": "DOUBLE",
    "prompt": "VARCHAR",
    "response": "VARCHAR",
}
"""Columns of the index with their types.  Another set of columns needs another ``segments.FORMAT``."""

_GROUPS = """
SELECT step, group_id, min("row") AS prompt_row, count(*) AS size,
    avg(reward) AS reward_mean, min(reward) AS reward_min, max(reward) AS reward_max, stddev_pop(reward) AS reward_std,
    avg(response_tokens) AS length_mean, max(response_tokens) AS length_max,
    count(*) FILTER (finish = 'stop') AS stopped, count(*) FILTER (finish = 'length') AS cut,
    count(*) FILTER (finish NOT IN ('stop', 'length')) AS others,
    max(lag) AS lag_max, avg(logprob_diff) AS logprob_diff, max(seconds) AS seconds_max, any_value(prompt) AS prompt
FROM {source} GROUP BY step, group_id
"""
_CREATE = f"""
CREATE TABLE samples ({", ".join(f'"{name}" {kind}' for name, kind in SAMPLE_COLUMNS.items())});
CREATE TABLE groups AS {_GROUPS.format(source="samples")};
CREATE TABLE versions (step INTEGER, version INTEGER, lag INTEGER, tokens BIGINT);
"""
_FROM_STEPS = f"""
SELECT
    step, group_id, sample, epoch, "row", reward, lag, finish, seconds,
    len(prompt_tokens) AS prompt_tokens, len(loss_mask) AS response_tokens,
    coalesce(list_sum(loss_mask), 0) AS trained_tokens, len(turns) AS turns,
    list_avg(list_transform(
        list_zip(logprobs, trainer_logprobs, loss_mask),
        lambda token: if(token[3] = 1 AND isfinite(token[1]) AND isfinite(token[2]), abs(token[1] - token[2]), NULL)
    )) AS logprob_diff,
    prompt[:{PREVIEW}] AS prompt, response[:{PREVIEW}] AS response
FROM chunk
"""
_ADD_VERSIONS = """
INSERT INTO versions
SELECT step, span.version, step - span.step AS lag, sum(list_sum(loss_mask[span.start + 1:span.stop])) AS tokens
FROM (SELECT step, loss_mask, unnest(spans) AS span FROM chunk)
GROUP BY ALL HAVING tokens > 0
"""


type Version = tuple[int, int, int, int]
"""Step, version, lag, and the number of trained tokens that the version wrote."""


def connect() -> duckdb.DuckDBPyConnection:
    """Return a database in memory with empty tables.  It opens no files and loads no extensions."""
    database = duckdb.connect(":memory:", config={"enable_external_access": False, "threads": 2})
    database.execute(_CREATE)
    return database


def add_steps(database: duckdb.DuckDBPyConnection, chunk: Any, replaced: Sequence[int] = ()) -> None:
    """Add the samples of some steps, of which the database has ``replaced`` already.

    ``chunk`` has ``SOURCE_COLUMNS`` as pyarrow's table.
    """
    database.register("chunk", chunk)
    with _transaction(database):
        if replaced:
            _delete(database, replaced)
        _insert(database, _FROM_STEPS)
        database.execute(_ADD_VERSIONS)
    database.unregister("chunk")


def joined(chunks: Sequence[Any]) -> Any:
    """Return the rows of all chunks."""
    import pyarrow as pa  # type: ignore[import-untyped]

    return pa.concat_tables(chunks)


def add_rows(database: duckdb.DuckDBPyConnection, samples: Any, versions: Sequence[Version]) -> None:
    """Add rows that ``rows_between`` returned."""
    database.register("chunk", samples)
    with _transaction(database):
        _insert(database, "FROM chunk")
        for columns in [list(zip(*versions, strict=True))] if versions else []:
            lists = ", ".join("unnest(?::BIGINT[])" for _ in columns)
            database.execute(f"INSERT INTO versions SELECT {lists}", list(map(list, columns)))
    database.unregister("chunk")


def rows_between(database: duckdb.DuckDBPyConnection, first: int, last: int) -> tuple[Any, list[Version]]:
    """Return the samples of the steps ``first`` to ``last`` as pyarrow's table, and their versions."""
    between = "WHERE step BETWEEN ? AND ? ORDER BY ALL"
    samples = database.sql(f"SELECT * FROM samples {between}", params=[first, last]).to_arrow_table()
    return samples, database.execute(f"SELECT * FROM versions {between}", [first, last]).fetchall()


def remove_steps(database: duckdb.DuckDBPyConnection, steps: Sequence[int]) -> None:
    """Remove all rows of some steps."""
    with _transaction(database):
        _delete(database, steps)


def _insert(database: duckdb.DuckDBPyConnection, rows: str) -> None:
    """Insert the rows of a query, and those of their groups, which are whole in it."""
    database.execute(f"CREATE OR REPLACE TEMP TABLE fresh AS {rows}")
    database.execute("INSERT INTO samples FROM fresh")
    database.execute(f"INSERT INTO groups {_GROUPS.format(source='fresh')}")
    database.execute("DROP TABLE fresh")


def _delete(database: duckdb.DuckDBPyConnection, steps: Sequence[int]) -> None:
    for table in ("samples", "groups", "versions"):
        database.execute(f"DELETE FROM {table} WHERE step IN (SELECT unnest(?::INTEGER[]))", [list(steps)])


@contextmanager
def _transaction(database: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Let other connections see all changes at once, or none of them."""
    database.begin()
    try:
        yield
    except BaseException:
        database.rollback()
        raise
    database.commit()


def no_samples() -> Any:
    """Return a table like that of ``with_text``, without rows."""
    import pyarrow as pa

    return pa.table(
        {"step": pa.array([], pa.int32()), "group_id": pa.array([], pa.int64()), "sample": pa.array([], pa.int32())}
    )


def with_text(database: duckdb.DuckDBPyConnection, chunk: Any, text: str) -> Any:
    """Return step, group and number of the samples of ``chunk`` whose prompt or response contains ``text``."""
    database.register("chunk", chunk)
    sql = """
    SELECT step, group_id, sample FROM chunk
    WHERE contains(lower(prompt), lower($text)) OR contains(lower(response), lower($text))
    """
    found = database.sql(sql, params={"text": text}).to_arrow_table()
    database.unregister("chunk")
    return found
