"""DuckDB on one column for each slot of each list."""

from __future__ import annotations

import duckdb

from benchmarks.shaped import TOP_K

from .common import clamped, counts_sql, folder, judged_sql, show


def main() -> None:
    """Count."""
    slots = range(TOP_K)
    mu, pi, after = (
        [clamped(f"topk_{name}_logprobs_{slot}") for slot in slots]
        for name in ("behavior", "pre", "post")
    )
    ids = ", ".join(f"topk_ids_{slot}" for slot in slots)

    def total(terms: list[str]) -> str:
        return " + ".join(terms)

    source = f"""
        SELECT seed, advantage, {clamped("behavior_logprob")} AS b, {clamped("pre_logprob")} AS p,
          {clamped("post_logprob")} AS q, CASE WHEN token_id IN ({ids}) THEN 0 ELSE 1 END AS alone,
          {total([f"exp({m})" for m in mu])} AS sm, {total([f"exp({m})" for m in pi])} AS sp,
          {total([f"exp({m})" for m in after])} AS sq,
          {total([f"exp({m}) * ({m} - {o})" for m, o in zip(mu, pi, strict=True)])} AS k0,
          {total([f"exp({m}) * ({m} - {o})" for m, o in zip(mu, after, strict=True)])} AS k1,
          {total([f"exp({o}) * (exp({m}) - exp({o}))" for m, o in zip(mu, pi, strict=True)])} AS g
        FROM read_parquet('{folder()}/*/*.parquet', hive_partitioning = true)"""
    connection = duckdb.connect()
    connection.execute("SET threads = 1")
    show(connection.execute(counts_sql(judged_sql(source))).fetchall())


if __name__ == "__main__":
    main()
