"""The ΔD table: one row per token with its divergences, its direction and every decision."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deltad.divergence import TAILS
from deltad.masks import CRITERIA, Rule, Tokens, rule

from .backends import Progress, Span
from .question import Question, QuestionError, check_rule, chosen_seeds
from .reading import (
    Ask,
    checked_batches,
    recorded_columns,
    seed_context,
    topk_columns,
    verify,
    with_verified,
)
from .result import Table, as_html, plain_cell, shown, title, without_nan
from .values import NOISE, WEIGHT, Block, Context, Known

if TYPE_CHECKING:
    import pandas as pd

    from deltad.dumps import Dump, PartFile

FORMATS: Final = ("parquet", "csv", "tsv", "json")
"""What `TokenTable.write` writes; `json` is one object per line."""

FIRST_ROWS: Final = 10
"""How many rows a notebook shows."""


@dataclass(frozen=True)
class TokenColumn:
    """One column of the ΔD table."""

    name: str
    kind: pa.DataType
    meaning: str  # with its unit
    where: str = ""  # column of a dump that it is copied from, or needs


_COPIED: Final = tuple(
    TokenColumn(name, kind, meaning, name)
    for name, kind, meaning in (
        ("step", pa.int32(), "optimizer step within the seed"),
        ("group", pa.int32(), "prompt"),
        ("sequence", pa.int32(), "response, unique within seed and step"),
        ("position", pa.int32(), "token within the response, from 0"),
        ("token_id", pa.int32(), "sampled token k"),
        ("token", pa.string(), "decoded text, where the dump has it"),
        ("advantage", pa.float32(), "Â"),
        ("in_loss", pa.bool_(), "its gradient took part in the applied update"),
        (WEIGHT, pa.float32(), "tokens that it stands for, where the dump has it"),
    )
)

TOKEN_COLUMNS: Final = (
    TokenColumn("arm", pa.string(), "the update that D after is measured under"),
    TokenColumn("seed", pa.int32(), "independent repetition"),
    *_COPIED,
    TokenColumn(
        "d_pre", pa.float64(), "top-K D before the update: nats for KL, else a probability"
    ),
    TokenColumn("d_post", pa.float64(), "top-K D after it"),
    TokenColumn("delta_d", pa.float64(), "ΔD = d_post − d_pre"),
    TokenColumn(NOISE, pa.float64(), "bound on the error of ΔD, where the dump has it", NOISE),
    TokenColumn("undetermined", pa.bool_(), "|ΔD| < delta_d_noise, where the dump has it", NOISE),
    TokenColumn("ratio", pa.float64(), "r = π_k/μ_k before the update"),
    TokenColumn("d_dot", pa.float64(), "the criterion's push: Ḋ, or r − 1; NULL for a weight"),
    TokenColumn("d_dot_local", pa.float64(), "local term of Ḋ; NULL for a push without terms"),
    TokenColumn("d_dot_global", pa.float64(), "global term of Ḋ; NULL for a push without terms"),
    TokenColumn("outside", pa.bool_(), "d_pre > δ; NULL where D is unknown"),
    TokenColumn("disagreement", pa.bool_(), "outside, and exactly one of the two masks it"),
)
"""Columns and what they mean. One `keep_<criterion>` for every criterion that the dump can answer
stands before `outside`: true where the gradient passes. D, ΔD, Ḋ and decisions are NULL where
they are unknown: in rows without top-K log-probs of which no D was recorded, `d_post` and ΔD also
where the policy after the update was not read."""


class TokenTable:
    """The ΔD table of a dump, streamed: nothing is read before it is asked for.

    Attributes
    ----------
    question : Question
        What was asked, its protocol settled.
    rules : tuple of Rule
        Whose decisions it holds.
    schema : pyarrow.Schema
        Columns of `TOKEN_COLUMNS` that this dump has, with the rules' decisions.
    """

    def __init__(
        self,
        dump: Dump,
        question: Question | None = None,
        *,
        criteria: Sequence[str | Rule] = (),
        seeds: Collection[int] = (),
        steps: Collection[int] = (),
        outside: bool = False,
        disagreement: bool = False,
        recompute: bool = False,
    ) -> None:
        """Ask for the tokens of a dump.

        Parameters
        ----------
        dump : Dump
            An open dump; every row of the columns used is checked.
        question : Question, optional
            Region, pair and protocol. Under `own` the rows of the criterion's arm come first,
            then those of the baseline's.
        criteria : sequence of str or Rule
            Whose decisions are wanted besides the pair's; by default every criterion's that the
            dump can answer.
        seeds, steps : collection of int
            Only these; all where empty.
        outside, disagreement : bool
            Only such tokens.
        recompute : bool
            From the top-K log-probs even where D and Ḋ are recorded.

        Raises
        ------
        QuestionError, CriterionError
            The dump cannot answer the question or has no such seed.
        """
        self._dump = dump
        self._resolved = (question or Question()).resolve(
            dump, needs=("pre",), disagreement_only=True
        )
        self.question = self._resolved.question
        arms, divergence = self._resolved.arms, self.question.divergence
        self._seeds = chosen_seeds(dump, arms[0], seeds)
        self._steps, self._recompute = list(steps), recompute
        wanted = {"outside": outside, "disagreement": disagreement}
        self._only = [name for name, chosen in wanted.items() if chosen]
        self._post = all("post" in dump.readings(arm) for arm in arms)
        present = frozenset.intersection(*(dump.optional_columns(arm) for arm in arms))
        asked = [rule(each) for each in criteria] or [
            each
            for each in CRITERIA.values()
            if each.family in (None, divergence) and present.issuperset(each.columns)
        ]
        for each in asked:
            each.check_family(divergence)
            for arm in arms:
                check_rule(dump, arm, each)
        every = {each.name: each for each in (*asked, *self.question.rules)}
        self.rules = tuple(every.values())
        optional = {"token", NOISE, WEIGHT} - present
        self._columns = [each for each in TOKEN_COLUMNS if each.where not in optional]
        fields = [pa.field(each.name, each.kind) for each in self._columns]
        keeps = [pa.field(_keep_name(each), pa.bool_()) for each in self.rules]
        self.schema = pa.schema([*fields[:-2], *keeps, *fields[-2:]])

    @property
    def rows(self) -> int:
        """Rows that will be read, before any filter."""
        pairs = itertools.product(self._resolved.arms, self._seeds)
        return sum(self._dump.rows(arm, seed) for arm, seed in pairs)

    def batches(self, *, progress: Progress | None = None) -> Iterator[pa.RecordBatch]:
        """Stream the rows as record batches of `schema`, none of them empty.

        An impossible value is a DumpError, a rule of the user's that fails a QuestionError;
        `progress` is told the number of rows of every block read.
        """
        ask = Ask(self.question, self.rules)
        for arm, seed in itertools.product(self._resolved.arms, self._seeds):
            context = seed_context(self._dump, arm, seed, ask)
            for part in self._dump.files(arm, seed):
                for block in self._read(part, progress):
                    values = self._judge(block, context)
                    wanted = np.ones(len(block.batch), np.bool_)
                    for name in self._only:
                        wanted &= values[name][0] & values[name][1]
                    if len(self._steps):
                        wanted &= np.isin(block.batch["step"], self._steps)
                    if wanted.any():
                        yield self._to_arrow(arm, seed, values, wanted)

    def to_frame(self, *, progress: Progress | None = None) -> pd.DataFrame:
        """All rows as a DataFrame; what is not known everywhere is an object: a value or None."""
        table = pa.Table.from_batches(self.batches(progress=progress), schema=self.schema)
        frame: pd.DataFrame = table.to_pandas()
        return frame

    def write(self, sink: BinaryIO, form: str, *, progress: Progress | None = None) -> int:
        """Write the table as a stream.

        Parameters
        ----------
        sink : binary file
            Open for writing.
        form : {"parquet", "csv", "tsv", "json"}
            `json` is one object per line.
        progress : callable, optional
            Told the number of rows of every block read.

        Returns
        -------
        int
            Rows written. Another form is a QuestionError; for the rest see `batches`.
        """
        if form not in FORMATS:
            raise QuestionError(f"tokens can be written as {', '.join(FORMATS)}, got {form!r}")
        written = 0
        with _writer(sink, form, self.schema) as write:
            for batch in self.batches(progress=progress):
                write(batch)
                written += batch.num_rows
        return written

    def __repr__(self) -> str:
        return f"<TokenTable of {self._dump.path}: {title(self.question)}, {self.rows} rows>"

    def _repr_html_(self) -> str:
        """What Jupyter shows: the first rows, which are read for it."""
        names = self.schema.names
        stream = (row for batch in self.batches() for row in batch.to_pylist())
        first = list(itertools.islice(stream, FIRST_ROWS))
        rows = [[shown(row[name]) for name in names] for row in first]
        words = f"the first {len(first)} rows" if first else "no such row"
        said = f"{words}; {self.rows:,} rows are read in all, {len(names)} columns"
        head = f"{title(self.question)} · {self.question.protocol}"
        return as_html([head, Table(names, rows), said])

    def _read(self, part: PartFile, progress: Progress | None) -> Iterator[Block]:
        """The rows of a file, judged by recorded D and Ḋ where they do, else by top-K log-probs."""
        divergence, names, judge = self.question.divergence, None, Block.recorded
        if not self._recompute:
            names = recorded_columns(part, self.question, self.rules, post=self._post)
        if names is not None:
            (span,) = with_verified([Span(part, 0, len(part.groups))])
            verify(span, divergence, names)
            wanted = ["d_dot_local"]
        else:
            names, judge = topk_columns(self.rules, post=self._post), Block.of_topk
            wanted = ["d_pre", "d_post"] if part.metadata.derived_divergence == divergence else []
        names += [name for name in wanted if name in part.columns]
        names += [each.where for each in self._columns if each.where]
        for batch in checked_batches(part, list(dict.fromkeys(names)), progress=progress):
            yield judge(batch, part, divergence)

    def _judge(self, block: Block, context: Context) -> dict[str, Known]:
        """Every column of a block, with where it is known."""
        batch, question, every = block.batch, self.question, np.ones(len(block.batch), np.bool_)
        values = {
            each.name: (batch[each.where], every) for each in _COPIED if each in self._columns
        }
        numbers = {"d_pre": block.d_pre, "d_post": block.d_post}
        numbers["delta_d"] = block.d_post - block.d_pre
        numbers |= {name: batch[name] for name in (WEIGHT, NOISE) if name in batch.columns}
        values |= {name: (column, ~np.isnan(column)) for name, column in numbers.items()}
        if NOISE in values:
            noise, bounded = values[NOISE]
            with np.errstate(invalid="ignore"):
                unclear = np.abs(numbers["delta_d"]) < noise
            values["undetermined"] = unclear, bounded & values["delta_d"][1]
        values["ratio"] = block.value(lambda tokens: tokens.ratio)
        values |= self._terms(block)
        for each in self.rules:
            values[_keep_name(each)] = block.keep(each, question.threshold, context)
        outside, settled = block.d_pre > question.threshold, block.settled
        (ours, known), (theirs, also) = (values[_keep_name(each)] for each in question.rules)
        values["outside"] = outside, settled
        values["disagreement"] = outside & (ours != theirs), settled & (~outside | (known & also))
        return values

    def _terms(self, block: Block) -> dict[str, Known]:
        """The criterion's push with local and global term."""
        judge, divergence = self.question.rules[0], self.question.divergence
        nothing = np.zeros(len(block.batch)), np.zeros(len(block.batch), np.bool_)
        found = dict.fromkeys(("d_dot", "d_dot_local", "d_dot_global"), nothing)
        if not judge.is_mask:  # has a formula and no push
            return found
        found["d_dot"] = block.value(lambda tokens: judge.pushes(tokens, divergence), judge)
        for tail in TAILS:
            if judge.push == f"{judge.family}-{tail}":
                for at, term in enumerate(("local", "global"), 1):
                    found[f"d_dot_{term}"] = block.value(partial(_term, divergence, tail, at))
        return found

    def _to_arrow(
        self, arm: str, seed: int, values: dict[str, Known], wanted: NDArray[np.bool_]
    ) -> pa.RecordBatch:
        """The wanted rows as Arrow columns."""
        count = int(np.count_nonzero(wanted))
        arrays = [
            pa.repeat(pa.scalar(arm, pa.string()), count),
            pa.array(np.full(count, seed, "i4")),
        ]
        for field in list(self.schema)[len(arrays) :]:
            column, valid = values[field.name]
            arrays.append(pa.array(column[wanted], field.type, mask=~valid[wanted]))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _term(divergence: str, tail: str, at: int, tokens: Tokens) -> Any:
    """The local or global term of Ḋ."""
    return tokens.direction(divergence, tail)[at]


def _keep_name(each: Rule) -> str:
    """Name of a rule's column."""
    return "keep_" + each.name.replace("-", "_")


@contextmanager
def _writer(
    sink: BinaryIO, form: str, schema: pa.Schema
) -> Iterator[Callable[[pa.RecordBatch], object]]:
    """A function that appends a batch to a file of the form."""
    if form == "json":
        yield lambda batch: sink.writelines(
            (json.dumps(without_nan(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
            for row in batch.to_pylist()
        )
    elif form in ("csv", "tsv"):
        import pyarrow.csv

        options = pyarrow.csv.WriteOptions(delimiter="," if form == "csv" else "\t")
        with pyarrow.csv.CSVWriter(sink, schema, write_options=options) as writer:
            yield lambda batch: writer.write_batch(_harmless(batch))
    else:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
            yield writer.write_batch


def _harmless(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch for a spreadsheet: no text in it becomes a formula."""
    for at, field in enumerate(batch.schema):
        if pa.types.is_string(field.type):
            texts = [each and plain_cell(each) for each in batch.column(at).to_pylist()]
            batch = batch.set_column(at, field, pa.array(texts, field.type))
    return batch
