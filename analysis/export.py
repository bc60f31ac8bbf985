"""Tables as plain objects and files: JSON, CSV, Markdown, Parquet.

The JSON object of a rate table is a contract that other tools lean on. CSV and Markdown need
no more than the standard library.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from . import statistics
from .rates import SIDES, Kept, RateTable, SideSummary

if TYPE_CHECKING:
    from .statistics import PooledDifference
    from .tables import ProtocolTable

FORMAT: Final = 1
"""Version of the JSON objects."""

RATE_COLUMNS: Final[dict[str, str]] = {
    "seed": "independent repetition",
    "tokens": "response tokens of the seed, stored or not",
    "outside": "tokens with D > δ before the update",
    "disagreement": "tokens outside that exactly one of the two criteria masks",
    **{
        f"{side}_{name}": meaning.format(side)
        for side in SIDES
        for name, meaning in (
            ("kept", "disagreement tokens that the {} keeps"),
            ("unsafe", "of the tokens that the {} keeps, those with ΔD > 0"),
            ("contracting", "of the tokens that the {} keeps, those with ΔD < 0"),
            ("undetermined", "of these, those whose ΔD is below the bound on its error"),
            (
                "unsafe_keep_rate",
                "unsafe / (kept − undetermined) of the {}, in [0, 1]; NaN over nothing",
            ),
        )
    },
}
"""Columns of a rate table, a row a seed, and what they mean."""

PROTOCOL_COLUMNS: Final[dict[str, str]] = {
    "protocol": "whose update a kept token is judged by",
    "criterion": "the criterion in question",
    "baseline": "the criterion that it is compared with",
    "seeds": "seeds of the dump",
    "outside": "tokens with D > δ before the update, all seeds",
    "outside_increase_rate": "share of them with ΔD > 0, of those with a sign: the base rate",
    "outside_undetermined": "of these, those whose ΔD is below the bound on its error",
    "disagreement": "tokens outside that exactly one criterion masks, all seeds",
    "disagreement_increase_rate": "share of them with ΔD > 0",
    "disagreement_undetermined": "of these, those whose ΔD is below the bound on its error",
    **{
        f"{side}_{name}": meaning.format(side)
        for side in reversed(SIDES)
        for name, meaning in (
            ("unsafe_keep_rate", "mean over seeds of unsafe / (kept − undetermined) of the {}"),
            ("unsafe_keep_rate_low", "lower end of its 95 % interval"),
            ("unsafe_keep_rate_high", "upper end of its 95 % interval"),
            (
                "contracting_fraction",
                "Σ contracting / Σ (kept − undetermined) of the {}, pooled over seeds",
            ),
            ("contracting_fraction_low", "lower end of its 95 % interval"),
            ("contracting_fraction_high", "upper end of its 95 % interval"),
        )
    },
    "paired_seeds": "seeds in which both have a rate",
    "lower": "paired seeds in which the criterion's rate is below the baseline's",
    "tied": "paired seeds in which they are equal",
    "higher": "paired seeds in which it is above",
    "difference": "criterion − baseline, mean over the paired seeds",
    "difference_low": "lower end of its 95 % interval",
    "difference_high": "upper end of its 95 % interval",
    "sign_test_p": "two-sided; ties left out",
    "wilcoxon_p": "two-sided signed-rank; zeros left out",
    "permutation_p": "two-sided, of the mean difference under sign flips; zeros left out",
    **{
        f"pooled_{name}_{end}": meaning.format(share)
        for name, share in (
            ("unsafe", "Σ unsafe / Σ (kept − undetermined)"),
            ("contracting", "Σ contracting / Σ (kept − undetermined)"),
        )
        for end, meaning in (
            ("difference", "{}, criterion − baseline"),
            ("difference_low", "lower end of its 95 % interval, seeds as clusters"),
            ("difference_high", "upper end of its 95 % interval, seeds as clusters"),
        )
    },
}
"""Columns of a protocol table, a row a protocol, and what they mean."""

Columns = Mapping[str, Sequence[Any]]


def rate_object(table: RateTable) -> dict[str, Any]:
    """The JSON object of a rate table.

    Parameters
    ----------
    table : RateTable
        Counts by seed.

    Returns
    -------
    dict
        Plain numbers, strings, lists and dicts; NaN is None.
    """
    question, paired = table.question, table.paired
    known: dict[str, Any] = without_nan(
        {
            "format": FORMAT,
            "threshold": question.threshold,
            "divergence": question.divergence,
            "protocol": question.protocol,
            "baseline": question.baseline,
            "criterion": question.criterion,
            "seeds": [
                {
                    "seed": seed.seed,
                    "tokens": seed.tokens,
                    "outside": seed.outside,
                    "disagreement": seed.disagreement,
                    **{side: _kept_object(getattr(seed, side)) for side in SIDES},
                }
                for seed in table.seeds
            ],
            "summary": {
                "seeds": len(table.seeds),
                "bootstrap": {
                    "method": statistics.METHOD,
                    "resamples": statistics.RESAMPLES,
                    "seed": table.bootstrap_seed,
                },
                "base": {
                    name: {
                        "tokens": base.tokens,
                        "undetermined": None if base.increase is None else base.undetermined,
                        "increase_rate": base.increase_rate,
                    }
                    for name, base in (
                        ("outside", table.outside),
                        ("disagreement", table.disagreement),
                    )
                },
                "tokens_per_seed": table.per_seed("tokens"),
                "outside_per_seed": table.per_seed("outside"),
                "disagreement_per_seed": table.per_seed("disagreement"),
                "share_of_sequences": table.share,
                "weighted": table.weighted,
                **{side: _side_object(getattr(table, side)) for side in SIDES},
                "paired": {
                    "seeds": paired.seeds,
                    "lower": paired.lower,
                    "tied": paired.tied,
                    "higher": paired.higher,
                    "difference": paired.difference,
                    "difference_ci95": list(paired.difference_ci95),
                    "sign_test_p": paired.sign_test_p,
                    "wilcoxon_p": paired.wilcoxon_p,
                    "permutation_p": paired.permutation_p,
                    "permutation": {
                        "method": "exact" if paired.permutation_exact else "monte-carlo",
                        "flips": paired.permutation_flips,
                        "seed": table.bootstrap_seed,
                    },
                },
                "pooled": {
                    "method": statistics.CLUSTER_METHOD,
                    "unsafe_keep_rate": _pooled_object(table.pooled_unsafe),
                    "contracting_fraction": _pooled_object(table.pooled_contracting),
                },
            },
        }
    )
    return known


def rate_columns(table: RateTable) -> dict[str, list[Any]]:
    """The columns of `RATE_COLUMNS`, a row a seed."""
    rows = []
    for seed in table.seeds:
        row = [seed.seed, seed.tokens, seed.outside, seed.disagreement]
        for side in SIDES:
            row += _kept_object(getattr(seed, side)).values()
        rows.append(row)
    return {name: [row[at] for row in rows] for at, name in enumerate(RATE_COLUMNS)}


def protocol_columns(protocols: ProtocolTable) -> dict[str, list[Any]]:
    """The columns of `PROTOCOL_COLUMNS`, a row a protocol."""
    rows = []
    for table in protocols.tables:
        question, paired = table.question, table.paired
        row: list[Any] = [question.protocol, question.criterion, question.baseline]
        row.append(len(table.seeds))
        for base in (table.outside, table.disagreement):
            unclear = math.nan if base.increase is None else base.undetermined
            row += [base.tokens, base.increase_rate, unclear]
        for side in (table.criterion, table.baseline):
            row += [side.unsafe_keep_rate, *side.unsafe_keep_rate_ci95]
            row += [side.contracting_fraction, *side.contracting_fraction_ci95]
        row += [paired.seeds, paired.lower, paired.tied, paired.higher, paired.difference]
        row += [*paired.difference_ci95, paired.sign_test_p, paired.wilcoxon_p]
        row.append(paired.permutation_p)
        for pooled in (table.pooled_unsafe, table.pooled_contracting):
            row += [pooled.difference, *pooled.difference_ci95]
        rows.append(row)
    return {name: [row[at] for row in rows] for at, name in enumerate(PROTOCOL_COLUMNS)}


def to_json(value: Any) -> str:
    """JSON text of an object, indented, NaN as null, with a newline at its end."""
    return json.dumps(without_nan(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(columns: Columns) -> bytes:
    """CSV text of columns, every digit of a float, an empty field for NaN."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow(["" if _is_nan(value) else value for value in row])
    return text.getvalue().encode()


def to_markdown(columns: Columns) -> bytes:
    """A Markdown table of columns, floats to four digits, a dash for NaN."""
    head = "| " + " | ".join(columns) + " |"
    rule = "|" + "|".join(" --- " for _ in columns) + "|"
    rows = [
        "| " + " | ".join(_cell(value) for value in row) + " |"
        for row in zip(*columns.values(), strict=True)
    ]
    return ("\n".join([head, rule, *rows]) + "\n").encode()


def to_parquet(columns: Columns) -> bytes:
    """A Parquet file of columns, NaN as NULL."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


COLUMN_FORMS: Final[Mapping[str, Callable[[Columns], bytes]]] = MappingProxyType(
    {"csv": to_csv, "markdown": to_markdown, "parquet": to_parquet}
)
"""The forms of a file that has columns, by the name that `--format` takes."""


def without_nan(value: Any) -> Any:
    """The same value with every float that JSON cannot hold (NaN, ±∞) made None."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kept_object(kept: Kept) -> dict[str, Any]:
    """One criterion of one seed, in the order of the JSON object and of `RATE_COLUMNS`."""
    return {
        "kept": kept.kept,
        "unsafe": kept.unsafe,
        "contracting": kept.contracting,
        "undetermined": kept.undetermined,
        "unsafe_keep_rate": kept.unsafe_keep_rate,
    }


def _side_object(side: SideSummary) -> dict[str, Any]:
    """One criterion over seeds, as in the JSON object."""
    return {
        "unsafe_keep_rate": side.unsafe_keep_rate,
        "unsafe_keep_rate_ci95": list(side.unsafe_keep_rate_ci95),
        "contracting_fraction": side.contracting_fraction,
        "contracting_fraction_ci95": list(side.contracting_fraction_ci95),
    }


def _pooled_object(pooled: PooledDifference) -> dict[str, Any]:
    """A pooled difference, as in the JSON object."""
    return {
        "criterion": pooled.criterion,
        "baseline": pooled.baseline,
        "difference": pooled.difference,
        "difference_ci95": list(pooled.difference_ci95),
        "p": pooled.p,
        "clusters": pooled.clusters,
        "degrees": pooled.degrees,
    }


def _cell(value: Any) -> str:
    """One value in a Markdown table."""
    if _is_nan(value) or value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _is_nan(value: Any) -> bool:
    """Whether a value is a float NaN."""
    return isinstance(value, float) and math.isnan(value)
