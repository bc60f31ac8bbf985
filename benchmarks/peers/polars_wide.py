"""Polars on one column for each slot of each list, lazily and streaming."""

from __future__ import annotations

import polars as pl

from benchmarks.shaped import TOP_K

from .common import FLOOR, THRESHOLD, folder, show


def clamp(name: str) -> pl.Expr:
    """A log-prob in float64, at most 0."""
    return pl.min_horizontal(pl.col(name).cast(pl.Float64), pl.lit(0.0))


def divergence(sums: str, mu_tail: str, pi_tail: str) -> pl.Expr:
    """D from the list's sum and the tails."""
    mu, pi = pl.col(mu_tail), pl.col(pi_tail).clip(lower_bound=FLOOR)
    return pl.col(sums) + pl.when(mu > 0).then(mu * (mu / pi).log()).otherwise(0.0)


def main() -> None:
    """Count."""
    slots = range(TOP_K)
    lists = {
        key: [clamp(f"topk_{name}_logprobs_{slot}") for slot in slots]
        for key, name in (("m", "behavior"), ("o", "pre"), ("a", "post"))
    }
    probs = {key: [each.exp() for each in values] for key, values in lists.items()}

    def against(key: str) -> pl.Expr:
        terms = zip(probs["m"], lists["m"], lists[key], strict=True)
        return pl.sum_horizontal([p * (m - o) for p, m, o in terms])

    ids = [pl.col(f"topk_ids_{slot}") for slot in slots]
    listed = pl.any_horizontal([each == pl.col("token_id") for each in ids])
    alone = pl.col("alone")
    b, p, q = (pl.col(name) for name in "bpq")
    frame = (
        pl.scan_parquet(f"{folder()}/*/*.parquet", hive_partitioning=True)
        .select(
            "seed",
            "advantage",
            clamp("behavior_logprob").alias("b"),
            clamp("pre_logprob").alias("p"),
            clamp("post_logprob").alias("q"),
            (~listed).cast(pl.Float64).alias("alone"),
            *(pl.sum_horizontal(values).alias(f"s{key}") for key, values in probs.items()),
            against("o").alias("k0"),
            against("a").alias("k1"),
            pl.sum_horizontal(
                [o * (m - o) for m, o in zip(probs["m"], probs["o"], strict=True)]
            ).alias("g"),
        )
        .with_columns(
            (1 - pl.col("sm") - alone * b.exp()).clip(lower_bound=0).alias("mt"),
            (1 - pl.col("so") - alone * p.exp()).clip(lower_bound=0).alias("pt"),
            (1 - pl.col("sa") - alone * q.exp()).clip(lower_bound=0).alias("qt"),
            (pl.col("k0") + alone * b.exp() * (b - p)).alias("k0"),
            (pl.col("k1") + alone * b.exp() * (b - q)).alias("k1"),
            (pl.col("g") + alone * p.exp() * (b.exp() - p.exp())).alias("g"),
        )
        .with_columns(divergence("k0", "mt", "pt").alias("d0"))
        .filter(pl.col("d0") > THRESHOLD)
        .with_columns(divergence("k1", "mt", "qt").alias("d1"))
        .select(
            "seed",
            (pl.col("d1") > pl.col("d0")).alias("up"),
            (pl.col("d1") < pl.col("d0")).alias("down"),
            (
                pl.col("advantage")
                * (p.exp() - b.exp() + pl.col("g") + pl.col("pt") * (pl.col("mt") - pl.col("pt")))
                > 0
            ).alias("out_p"),
            (pl.col("advantage") * (p - b) > 0).alias("out_r"),
        )
        .group_by("seed")
        .agg(
            pl.len(),
            pl.col("up").sum().alias("increase"),
            (pl.col("out_p") != pl.col("out_r")).sum().alias("disagreement"),
            *(
                chosen.sum().alias(f"{name}_{what}")
                for name, kept in (
                    ("p", ~pl.col("out_p") & pl.col("out_r")),
                    ("r", ~pl.col("out_r") & pl.col("out_p")),
                )
                for what, chosen in (
                    ("kept", kept),
                    ("unsafe", kept & pl.col("up")),
                    ("contracting", kept & pl.col("down")),
                )
            ),
        )
        .sort("seed")
    )
    show(frame.collect(engine="streaming").iter_rows())


if __name__ == "__main__":
    main()
