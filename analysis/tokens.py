"""The ΔD table: a row a token with its divergences, its direction and every decision."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deltad.direction import TAILS
from deltad.dumps import batch_tokens, scalar_tokens
from deltad.masks import CRITERIA, Criterion, CriterionError, Tokens
from deltad.weights import Weight

from .counting import NOISE, checked_batches, columns_for
from .engine import Progress
from .export import without_nan
from .question import Question, QuestionError

if TYPE_CHECKING:
    import pandas as pd

    from deltad.dumps import Batch, Dump, Metadata

FORMATS: Final = ("parquet", "csv", "json")
"""What `write_tokens` writes; `json` is one object a line."""

_Column: TypeAlias = NDArray[Any] | None
_Values: TypeAlias = dict[str, tuple[NDArray[Any], NDArray[np.bool_]]]
"""A column's values by name, and where they are known."""

_COPIED: Final = ("advantage", "in_loss")
_UNDETERMINED: Final = "undetermined"
KEY_COLUMNS: Final = ("step", "group", "sequence", "position", "token_id")

TOKEN_COLUMNS: Final[dict[str, tuple[pa.DataType, str]]] = {
    "arm": (pa.string(), "the update that D after is measured under"),
    "seed": (pa.int32(), "independent repetition"),
    "step": (pa.int32(), "optimizer step within the seed"),
    "group": (pa.int32(), "prompt"),
    "sequence": (pa.int32(), "response, unique within seed and step"),
    "position": (pa.int32(), "token within the response, from 0"),
    "token_id": (pa.int32(), "sampled token k"),
    "token": (pa.string(), "decoded text, where the dump has it"),
    "advantage": (pa.float32(), "Â"),
    "in_loss": (pa.bool_(), "its gradient took part in the applied update"),
    "d_pre": (pa.float64(), "top-K D before the update: nats for KL, a probability for TV"),
    "d_post": (pa.float64(), "top-K D after it"),
    "delta_d": (pa.float64(), "ΔD = d_post − d_pre"),
    "delta_d_noise": (pa.float64(), "bound on the error of ΔD, where the dump has it"),
    "undetermined": (pa.bool_(), "|ΔD| < delta_d_noise, where the dump has it"),
    "ratio": (pa.float64(), "r = π_k/μ_k before the update"),
    "d_dot": (
        pa.float64(),
        "the criterion's direction: Ḋ, or r − 1 for one by the ratio; NULL for a weight",
    ),
    "d_dot_local": (pa.float64(), "local term of Ḋ; NULL for a direction that has no terms"),
    "d_dot_global": (pa.float64(), "global term of Ḋ; NULL for a direction that has no terms"),
    "outside": (pa.bool_(), "d_pre > δ; false where the top-K vectors were not stored"),
    "disagreement": (pa.bool_(), "outside, and exactly one of criterion and baseline masks it"),
}
"""Columns and what they mean. One `keep_<criterion>` for every criterion that the dump can
answer stands before `outside`: true where the gradient passes. D, ΔD, Ḋ and decisions are NULL
where they need the top-K vectors and a row has none, `d_post` and ΔD also where the policy after
the update was not read, and what is undetermined where no bound was recorded."""


class TokenTable:
    """The ΔD table of a dump, streamed: nothing is read before it is asked for.

    Attributes
    ----------
    question : Question
        What was asked, its protocol settled.
    schema : pyarrow.Schema
        Columns of `TOKEN_COLUMNS` that this dump has, with its criteria's decisions.
    """

    def __init__(
        self,
        dump: Dump,
        question: Question | None = None,
        *,
        seeds: Collection[int] = (),
        outside: bool = False,
        disagreement: bool = False,
    ) -> None:
        """Ask for the tokens of a dump.

        Parameters
        ----------
        dump : Dump
            An open dump; every row of the columns used is checked.
        question : Question, optional
            Region, pair and protocol. Under `own` the rows of the criterion's arm come first,
            then those of the baseline's.
        seeds : collection of int
            Only these; all where empty.
        outside, disagreement : bool
            Only such tokens.

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
        known = dump.seeds(self._resolved.criterion_arm)
        missing = sorted(set(seeds) - set(known))
        if missing:
            raise QuestionError(
                f"there is no seed {', '.join(map(str, missing))} in {dump.path}: "
                f"its seeds are {', '.join(map(str, known))}"
            )
        self._seeds = [seed for seed in known if not seeds or seed in seeds]
        self._only = [
            name
            for name, wanted in (("outside", outside), ("disagreement", disagreement))
            if wanted
        ]
        present = set.intersection(
            *(set(dump.optional_columns(arm)) for arm in self._resolved.arms)
        )
        self._criteria = [
            each
            for each in CRITERIA.values()
            if each.family in (None, self.question.divergence) and present.issuperset(each.columns)
        ]
        self._copied = [*KEY_COLUMNS, *(["token"] if "token" in present else []), *_COPIED]
        self._noise = NOISE in present
        decided = columns_for(
            self._resolved.criterion,
            self._resolved.baseline,
            *self._criteria,
            post=all("post" in dump.readings(arm) for arm in self._resolved.arms),
        )
        noise = [NOISE] if self._noise else []
        self._columns = list(dict.fromkeys([*self._copied, *decided, *noise]))
        self.schema = self._make_schema()

    @property
    def rows(self) -> int:
        """Rows that will be read, before any filter."""
        pairs = itertools.product(self._resolved.arms, self._seeds)
        return sum(self._dump.rows(arm, seed) for arm, seed in pairs)

    def batches(self, *, progress: Progress | None = None) -> Iterator[pa.RecordBatch]:
        """Stream the rows.

        Parameters
        ----------
        progress : callable, optional
            Told the number of rows of every block read.

        Yields
        ------
        pyarrow.RecordBatch
            Of `schema`, never of no rows.

        Raises
        ------
        DumpError
            A row holds an impossible value.
        """
        for arm, seed in itertools.product(self._resolved.arms, self._seeds):
            stream = checked_batches(self._dump, arm, seed, self._columns, progress=progress)
            for batch, metadata in stream:
                values = self._judge(batch, metadata)
                wanted = np.ones(len(batch), dtype=np.bool_)
                for name in self._only:
                    wanted &= values[name][0]
                if wanted.any():
                    yield self._to_arrow(arm, seed, values, wanted)

    def _repr_html_(self) -> str:
        """What Jupyter shows: the first rows, which are read for it."""
        from .forms.tokens import token_text
        from .html import as_html

        return as_html(token_text(self))

    def to_frame(self, *, progress: Progress | None = None) -> pd.DataFrame:
        """All rows as a DataFrame.

        Parameters
        ----------
        progress : callable, optional
            Told the number of rows of every block read.

        Returns
        -------
        DataFrame
            Decisions that are not known everywhere are objects: True, False or None.
        """
        table = pa.Table.from_batches(self.batches(progress=progress), schema=self.schema)
        frame: pd.DataFrame = table.to_pandas()
        return frame

    def write(self, sink: BinaryIO, form: str, *, progress: Progress | None = None) -> int:
        """Write the table as a stream.

        Parameters
        ----------
        sink : binary file
            Open for writing.
        form : {"parquet", "csv", "json"}
            `json` is one object a line.
        progress : callable, optional
            Told the number of rows of every block read.

        Returns
        -------
        int
            Rows written.

        Raises
        ------
        QuestionError
            Another form.
        DumpError
            A row holds an impossible value.
        """
        if form not in FORMATS:
            raise QuestionError(f"tokens can be written as {', '.join(FORMATS)}, got {form!r}")
        written = 0
        with _writer(sink, form, self.schema) as write:
            for batch in self.batches(progress=progress):
                write(batch)
                written += batch.num_rows
        return written

    def _make_schema(self) -> pa.Schema:
        """The documented columns, less those that the dump lacks, with one a criterion."""
        fields = []
        for name, (kind, _) in TOKEN_COLUMNS.items():
            if name == "outside":
                fields += [pa.field(_keep_name(each), pa.bool_()) for each in self._criteria]
            absent = [] if "token" in self._copied else ["token"]
            absent += [] if self._noise else [NOISE, _UNDETERMINED]
            if name not in absent:
                fields.append(pa.field(name, kind))
        return pa.schema(fields)

    def _judge(self, batch: Batch, metadata: Metadata) -> _Values:
        """Every derived column of a block, with where it is known."""
        known = batch.vectors
        every = np.ones(len(known), dtype=np.bool_)
        sets = [(scalar_tokens(batch), ~known)] if not known.all() else []
        d_pre = np.full(len(known), np.nan)
        d_post = np.full(len(known), np.nan)
        if known.any():
            tokens = batch_tokens(batch, metadata)
            d_pre[known] = tokens.divergence(self.question.divergence)
            if "post_logprob" in batch.columns:
                after = batch_tokens(batch, metadata, post=True)
                d_post[known] = after.divergence(self.question.divergence)
            sets.append((tokens, known))
        values: _Values = {name: (batch.columns[name], every) for name in self._copied}
        values["d_pre"] = (d_pre, known)
        for name, column in (("d_post", d_post), ("delta_d", d_post - d_pre)):
            values[name] = (column, known & ("post_logprob" in batch.columns))
        if self._noise:
            noise = batch[NOISE]
            bounded = values["delta_d"][1] & ~np.isnan(noise)
            values[NOISE] = (noise, ~np.isnan(noise))
            with np.errstate(invalid="ignore"):
                values[_UNDETERMINED] = (np.abs(values["delta_d"][0]) < noise, bounded)
        values["ratio"] = _gather(lambda tokens: tokens.ratio, sets, np.float64)
        directions = [(_directions(self._resolved.criterion, tokens), at) for tokens, at in sets]
        for place, name in enumerate(("d_dot", "d_dot_local", "d_dot_global")):
            values[name] = _fill([(found[place], at) for found, at in directions], np.float64)
        for each in (*self._criteria, self._resolved.criterion, self._resolved.baseline):
            values[_keep_name(each)] = _gather(self._decide(each), sets, np.bool_)
        is_outside = known & (np.where(known, d_pre, 0) > self.question.threshold)
        ours, theirs = (
            values[_keep_name(each)][0]
            for each in (self._resolved.criterion, self._resolved.baseline)
        )
        values["outside"] = (is_outside, every)
        values["disagreement"] = (is_outside & (ours != theirs), every)
        return values

    def _decide(self, each: Criterion | Weight) -> Callable[[Tokens], NDArray[np.bool_]]:
        """One criterion's decisions about some tokens."""
        threshold, divergence = self.question.threshold, self.question.divergence
        return lambda tokens: each.keep(tokens, threshold=threshold, divergence=divergence)

    def _to_arrow(
        self, arm: str, seed: int, values: _Values, wanted: NDArray[np.bool_]
    ) -> pa.RecordBatch:
        """The wanted rows as Arrow columns."""
        count = int(np.count_nonzero(wanted))
        arrays = []
        for field in self.schema:
            if field.name == "arm":
                array = pa.array([arm] * count, field.type)
            elif field.name == "seed":
                array = pa.array(np.full(count, seed, dtype=np.int32))
            else:
                column, valid = values[field.name]
                array = pa.array(column[wanted], field.type, mask=~valid[wanted])
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _keep_name(each: Criterion | Weight) -> str:
    """Name of a criterion's column."""
    return "keep_" + each.name.replace("-", "_")


def _directions(each: Criterion | Weight, tokens: Tokens) -> tuple[_Column, _Column, _Column]:
    """A criterion's direction with local and global term, None for what is not known."""
    if isinstance(each, Weight):  # has a formula and no direction
        return None, None, None
    tail = each.name.rpartition("-")[2]
    try:
        if each.family is not None and tail in TAILS:
            direction = tokens.direction(each.family, tail)
            return direction.total, direction.local, direction.global_
        return each.push(tokens), None, None
    except CriterionError:  # rows without vectors
        return None, None, None


def _gather(
    compute: Callable[[Tokens], NDArray[Any]],
    sets: list[tuple[Tokens, NDArray[np.bool_]]],
    dtype: type[np.generic],
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """A column from its values in some sets of rows, unknown where a set lacks what it needs."""
    found: list[tuple[_Column, NDArray[np.bool_]]] = []
    for tokens, at in sets:
        try:
            found.append((compute(tokens), at))
        except CriterionError:  # rows without vectors
            found.append((None, at))
    return _fill(found, dtype)


def _fill(
    found: list[tuple[_Column, NDArray[np.bool_]]], dtype: type[np.generic]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Put the values of disjoint sets of rows into one column."""
    count = len(found[0][1]) if found else 0
    column = np.zeros(count, dtype=dtype)
    valid = np.zeros(count, dtype=np.bool_)
    for values, at in found:
        if values is not None:
            column[at] = values
            valid |= at
    return column, valid


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
    elif form == "csv":
        import pyarrow.csv

        with pyarrow.csv.CSVWriter(sink, schema) as writer:
            yield writer.write_batch
    else:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
            yield writer.write_batch
