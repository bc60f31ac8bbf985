"""DuckDB on the dump as it is: lists taken apart into rows, and summed by token."""

from __future__ import annotations

import duckdb

from .common import clamped, counts_sql, folder, judged_sql, show


def main() -> None:
    """Count."""
    lists = {"m": "behavior", "o": "pre", "a": "post"}
    parts = ", ".join(f"unnest(topk_{name}_logprobs) AS {key}" for key, name in lists.items())
    source = f"""
        SELECT seed, any_value(advantage) AS advantage, any_value(b) AS b, any_value(p) AS p,
          any_value(q) AS q, 1 - max((id = token_id)::INT) AS alone,
          sum(exp(m)) AS sm, sum(exp(o)) AS sp, sum(exp(a)) AS sq,
          sum(exp(m) * (m - o)) AS k0, sum(exp(m) * (m - a)) AS k1,
          sum(exp(o) * (exp(m) - exp(o))) AS g
        FROM (
          SELECT seed, row, token_id, advantage, b, p, q, id, {clamped("m")} AS m,
            {clamped("o")} AS o, {clamped("a")} AS a
          FROM (
            SELECT seed, file_row_number AS row, token_id, advantage,
              {clamped("behavior_logprob")} AS b, {clamped("pre_logprob")} AS p,
              {clamped("post_logprob")} AS q, unnest(topk_ids) AS id, {parts}
            FROM read_parquet('{folder()}/arm=none/*/*.parquet', hive_partitioning = true,
              file_row_number = true)))
        GROUP BY seed, row"""
    connection = duckdb.connect()
    connection.execute("SET threads = 1")
    show(connection.execute(counts_sql(judged_sql(source))).fetchall())


if __name__ == "__main__":
    main()
