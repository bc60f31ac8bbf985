"""The columns of a dump, declared as data: the schema, the checks and the reference use them.

`python -m deltad.dumps.columns` prints the column reference, `… columns FILE` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from .column import Column


def _whole_vocabulary(family: str, unit: str) -> tuple[Column, ...]:
    """Columns of one divergence over the whole vocabulary."""
    name, what = f"full_{family}", f"{family.upper()} over the whole vocabulary"
    return (
        Column(
            f"{name}_pre", "float64", unit, False, f"D before the step: {what}, where the "
            "recorder had all of μ", f"divergence_{family}",
        ),
        Column(
            f"{name}_post", "float64", unit, False, f"D after the step: {what}",
            f"divergence_{family}", shared=False, before=f"{name}_pre",
        ),
        Column(
            f"{name}_direction", "float64", unit, False, f"Ḋ before the step of the {what}",
            "finite",
        ),
    )  # fmt: skip


def _rung(name: str, unit: str, meaning: str) -> Column:
    """A column of the ladder, which a token may lack."""
    return Column(name, "float32", unit, False, meaning, "finite", shared=False, nullable=True)


def _value(name: str, meaning: str, rule: str, before: str | None = None) -> Column:
    """A derived number in the unit of its divergence."""
    return Column(
        name, "float64", "nats", False, meaning, rule, shared=before is None, before=before,
        nullable=True, derived=True,
    )  # fmt: skip


_DERIVED: Final = (
    _value(
        "d_pre",
        "D before the step on the top-K support, of the divergence that the metadata's `derived` "
        "names (a probability for TV); in a row without vectors rounded down to float32, or NULL",
        "derived_divergence",
    ),
    _value("d_post", "D after the step; otherwise as `d_pre`", "derived_divergence", "d_pre"),
    *(
        _value(
            f"d_dot_{tail}", f"Ḋ before the step, {how}; NULL in a row without vectors", "finite"
        )
        for tail, how in (
            ("aggregated", "the tail one atom"),
            ("uniform", "the tail equal atoms"),
            ("exact", "the tail by `pre_collision`"),
            ("local", "its local term, the same for every tail"),
        )
    ),
    Column(
        "sampled_rank", "int16", "", False,
        "place of the sampled token in `topk_ids`, from 0; −1 where it is not listed, −2 where "
        "there were no lists", "rank", derived=True,
    ),
)  # fmt: skip

_ALL: Final = (
    Column("step", "int32", "", True, "optimizer step within the seed", "any"),
    Column("group", "int32", "", True, "prompt", "any"),
    Column("sequence", "int32", "", True, "response, unique within seed and step", "any"),
    Column("position", "int32", "", True, "token within the response, from 0", "index"),
    Column("token_id", "int32", "", True, "sampled token k", "id"),
    Column("advantage", "float32", "", True, "advantage Â", "finite"),
    Column(
        "in_loss", "bool", "", True,
        "whether this token's gradient took part in the applied update", "any", shared=False,
    ),
    Column("behavior_logprob", "float32", "nats", True, "log μ_k", "logprob"),
    Column(
        "pre_logprob", "float32", "nats", True, "log π_k before the step", "logprob",
        reading="pre",
    ),
    Column(
        "post_logprob", "float32", "nats", True, "log π_k after the step", "logprob",
        shared=False, before="pre_logprob", reading="post",
    ),
    Column(
        "topk_ids", "int32[K]", "", True,
        "the behavior policy's top-K ids in rank order, distinct; −1 pads a position where the "
        "engine returned fewer; NULL as a whole, with the three below, where a row's vectors "
        "were not stored", "ids",
    ),
    Column(
        "topk_behavior_logprobs", "float32[K]", "nats", True,
        "log μ at `topk_ids`; may be −∞; NaN at padding, where it is never read",
        "logprobs_or_zero",
    ),
    Column(
        "topk_pre_logprobs", "float32[K]", "nats", True,
        "log π before the step at `topk_ids`; NaN at padding", "logprobs", reading="pre",
    ),
    Column(
        "topk_post_logprobs", "float32[K]", "nats", True,
        "log π after the step at `topk_ids`; NaN at padding", "logprobs",
        shared=False, before="topk_pre_logprobs", reading="post",
    ),
    Column(
        "pre_collision", "float32", "", False,
        "Σ_j π_j² before the step over the whole vocabulary, which gives the exact tail",
        "collision",
    ),
    Column(
        "post_collision", "float32", "", False,
        "Σ_j π_j² after the step over the whole vocabulary", "collision",
        shared=False, before="pre_collision",
    ),
    Column("pre_entropy", "float32", "nats", False, "entropy of π before the step", "entropy"),
    Column(
        "post_entropy", "float32", "nats", False, "entropy of π after the step", "entropy",
        shared=False, before="pre_entropy",
    ),
    *_whole_vocabulary("kl", "nats"),
    *_whole_vocabulary("tv", ""),
    Column(
        "linear_delta", "float32", "nats", False,
        "exact first-order ΔD along this arm's parameter update (a Jacobian-vector product); "
        "which D, and how, says the metadata's `ladder`",
        "finite", shared=False,
    ),
    _rung(
        "linear_delta_own", "nats",
        "first-order ΔD along the gradient step of −r Â of this token alone, per unit of "
        "learning rate; NULL where the token was not sampled",
    ),
    _rung(
        "linear_delta_sequence", "nats",
        "the same along the step of the sum of −r Â over the tokens of its sequence that are in "
        "the loss; NULL where the token was not sampled",
    ),
    _rung(
        "linear_delta_batch", "nats",
        "the same along minus the gradient that the optimizer saw: plain SGD; NULL where there "
        "was none to see",
    ),
    _rung("delta_tenth", "nats", "ΔD at a tenth of the step that was made; NULL where the "
          "parameters' precision cannot hold it"),
    _rung("delta_triple", "nats", "ΔD at three times the step; NULL where the policy is not "
          "finite there"),
    Column(
        "delta_d_noise", "float64", "nats", False,
        "bound on the error of ΔD that rounding in the policy's readout made; a ΔD below it is "
        "undetermined; NULL where it is not known",
        "noise", shared=False, nullable=True,
    ),
    *_DERIVED,
    Column(
        "weight", "float32", "", False,
        "inverse of the probability with which this row's sequence was chosen for recording; "
        "see the metadata's `sampling`",
        "weight",
    ),
    Column("token", "string", "", False, "decoded text, for viewers", "any"),
)  # fmt: skip

COLUMNS: Final[Mapping[str, Column]] = MappingProxyType({column.name: column for column in _ALL})
"""Every column by name, in the order of the file; `arm` and `seed` lie in the folders' names."""

REQUIRED: Final = tuple(column.name for column in _ALL if column.required)
"""Columns that every file has, but for those of a reading that was not made."""

READINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        reading: tuple(column.name for column in _ALL if column.reading == reading)
        for reading in ("pre", "post")
    }
)
"""Columns of the policy before and after the step, which a file has together or not at all."""

OPTIONAL: Final = tuple(column.name for column in _ALL if not column.required)
"""Columns that a file may have."""

DERIVED: Final = tuple(column.name for column in _ALL if column.derived)
"""Optional columns that `DumpWriter` fills from the others."""

VECTORS: Final = tuple(column.name for column in _ALL if column.is_vector)
"""The columns of K values a row, which are NULL together or not at all."""

KEY: Final = ("step", "sequence", "position")
"""What identifies a token within an arm and a seed."""


def missing_columns(present: Iterable[str]) -> list[str]:
    """Find the columns that a file lacks.

    Parameters
    ----------
    present : iterable of str
        Columns that it has.

    Returns
    -------
    list of str
        Required columns that are not there, in the contract's order. A reading of which no
        column is there was not made and lacks nothing, but after the step is nothing without
        before it.

    Examples
    --------
    >>> everything = set(REQUIRED)
    >>> missing_columns(everything - {"post_logprob", "topk_post_logprobs"})
    []
    >>> missing_columns(everything - {"post_logprob"})
    ['post_logprob']
    """
    found = set(present)
    made = {reading for reading, names in READINGS.items() if found & set(names)}
    if "post" in made:
        made.add("pre")
    return [
        column.name
        for column in _ALL
        if column.required
        and column.name not in found
        and (not column.reading or column.reading in made)
    ]


def derived_names(columns: Collection[str]) -> tuple[str, ...]:
    """Which derived columns a file with these columns can have.

    Parameters
    ----------
    columns : collection of str
        Of the file or batch.

    Returns
    -------
    tuple of str
        In the contract's order: none without the policy before the step, no `d_post` without
        that after it, no `d_dot_exact` without `pre_collision`.
    """
    if "topk_pre_logprobs" not in columns:
        return ()
    absent = set()
    if "topk_post_logprobs" not in columns:
        absent.add("d_post")
    if "pre_collision" not in columns:
        absent.add("d_dot_exact")
    return tuple(name for name in DERIVED if name not in absent)


def schema(
    top_k: int,
    *,
    vectors_nullable: bool = False,
    optional: Iterable[str] = (),
    readings: Iterable[str] = tuple(READINGS),
) -> pa.Schema:
    """Arrow schema of a file.

    Parameters
    ----------
    top_k : int
        K, values in a list.
    vectors_nullable : bool
        Whether rows without vectors can occur.
    optional : iterable of str
        Optional columns that the file has.
    readings : iterable of {"pre", "post"}
        Readings of the policy that were made.

    Returns
    -------
    pyarrow.Schema
        In the order of `COLUMNS`; nothing is nullable but columns that say so, and the vectors
        where asked for.

    Raises
    ------
    ValueError
        `optional` names a column that is not an optional one.

    Examples
    --------
    >>> schema(4, optional=["pre_entropy"]).field("topk_ids").type.list_size
    4
    """
    wanted, made = set(optional), {"", *readings}
    if unknown := sorted(wanted - set(OPTIONAL)):
        raise ValueError(
            f"optional columns are {', '.join(OPTIONAL)}; got {', '.join(map(repr, unknown))}"
        )
    return pa.schema(
        [
            pa.field(
                column.name,
                column.arrow_type(top_k),
                nullable=column.nullable or (column.is_vector and vectors_nullable),
            )
            for column in _ALL
            if (column.required and column.reading in made) or column.name in wanted
        ]
    )


def column_reference() -> str:
    """Write the column reference of the documentation.

    Returns
    -------
    str
        Markdown.
    """
    lines = [
        "# Columns of a dump",
        "",
        "Generated by `python -m deltad.dumps.columns docs/columns.md` from the columns declared",
        "in `deltad/dumps/columns.py`; change them there.",
        "",
        "A file is `RUN/arm=<name>/seed=<int>/part-<rank>-<n>.parquet`; one row is one response",
        "token in one real optimizer step. K is `top_k` of the file's metadata. All distributions",
        "are at the sampling temperature. NULL is allowed in the columns of K values, together,",
        "and where the meaning says so. A file has both `pre` columns of the policy's log-probs or",
        "neither, and so with `post`, which needs `pre`: what was not read is not there.",
        "",
        "Lists may be of any Arrow list type, if each has K values; integers may be of any width",
        "that holds the values, or whole numbers in float64; float64 is rounded to float32 where",
        "that is the column's type, as `DumpWriter` rounds it.",
        "",
        "| column | type | unit | in every file | same in all arms | meaning |",
        "|---|---|---|---|---|---|",
        "| `arm` | string, folder | | yes | | the update that was applied |",
        "| `seed` | int32, folder | | yes | | independent repetition |",
    ]
    for column in _ALL:
        kind = (
            "string or dictionary" if column.is_text else column.expected(0).replace("[0]", "[K]")
        )
        lines.append(
            f"| `{column.name}` | {kind} | {column.unit} | {_presence(column)} "
            f"| {'yes' if column.shared else 'no'} | {column.meaning} |"
        )
    return "\n".join(lines) + "\n"


def _presence(column: Column) -> str:
    """Whether every file has it."""
    if column.reading:
        return f"where {column.reading} was read"
    return "yes" if column.required else "no"


def main(arguments: list[str]) -> int:
    """Print the reference, or write it into the file named."""
    if arguments:
        Path(arguments[0]).write_text(column_reference(), encoding="utf-8")
    else:
        sys.stdout.write(column_reference())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
