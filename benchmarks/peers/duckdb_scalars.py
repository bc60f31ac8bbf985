"""DuckDB on the derived columns of the dump."""

from __future__ import annotations

import time

import duckdb

from .common import THRESHOLD, clamped, counts_sql, folder, show


def main() -> None:
    """Count, and say what counting alone took."""
    source = f"""
        SELECT seed, d_pre AS d0, d_post AS d1, advantage * d_dot_aggregated > 0 AS out_p,
          advantage * ({clamped("pre_logprob")} - {clamped("behavior_logprob")}) > 0 AS out_r
        FROM read_parquet('{folder()}/arm=none/*/*.parquet', hive_partitioning = true)
        WHERE d_pre > {THRESHOLD}"""
    begin = time.process_time()
    connection = duckdb.connect()
    connection.execute("SET threads = 1")
    rows = connection.execute(counts_sql(source)).fetchall()
    taken = time.process_time() - begin
    show(rows)
    print(taken)


if __name__ == "__main__":
    main()
