"""Prompts beside the rows: `RUN/_prompts/seed=<int>/part-<rank>-<n>.parquet`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from .aside import aside_path, publish, remove_leftovers
from .errors import DAMAGE, DumpError, first_line, unreadable
from .layout import PROMPTS, check_seed, is_skipped, parse_part, parse_seed
from .storage import StorageError, open_parquet, place

PROMPT_SCHEMA: Final = pa.schema(
    [
        pa.field("group", pa.int32(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.field("element", pa.int32())), nullable=False),
        pa.field("answer", pa.string()),
    ]
)
"""Columns of a file of prompts."""


class Prompt(NamedTuple):
    """One prompt of a seed.

    Attributes
    ----------
    group : int
        As in the rows.
    prompt : str
        Its text.
    prompt_ids : list of int
        Its ids.
    answer : str or None
        What was right, where the task knows.
    """

    group: int
    prompt: str
    prompt_ids: list[int]
    answer: str | None


def write_prompts(
    run: str | Path, *, seed: int, rows: Sequence[Mapping[str, Any]], rank: int = 0
) -> Path:
    """Write the prompts of one seed beside the rows, replacing what was there.

    Parameters
    ----------
    run : str or Path
        RUN, made if need be.
    seed : int
        Independent repetition.
    rows : sequence of mappings
        With `group` (int), `prompt` (text), `prompt_ids` (ints) and `answer` (text or None).
    rank : int
        Of the process that writes.

    Returns
    -------
    Path
        `RUN/_prompts/seed=<seed>/part-<rank>-0.parquet`.

    Raises
    ------
    DumpError
        A row lacks a key or holds a wrong type.
    """
    check_seed(seed)
    run = place(run)
    target = run / PROMPTS / f"seed={seed}" / f"part-{rank}-0.parquet"
    try:
        table = pa.Table.from_arrays(
            [pa.array([row[item.name] for row in rows], item.type) for item in PROMPT_SCHEMA],
            schema=PROMPT_SCHEMA,
        )
    except KeyError as error:
        raise DumpError(target, f"a row of prompts lacks {error}") from error
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise DumpError(target, f"prompts cannot be written ({first_line(error)})") from error
    for item in PROMPT_SCHEMA:
        if not item.nullable and table.column(item.name).null_count:
            raise DumpError(target, "must not be None", column=item.name)
    run.mkdir(parents=True, exist_ok=True)
    name = f"prompts.seed={seed}.part-{rank}-0."
    remove_leftovers(run, name)
    aside = aside_path(run, name)
    try:
        pq.write_table(table, aside, compression="zstd", compression_level=1)
        publish(aside, target, replace=True)
    finally:
        aside.unlink(missing_ok=True)
    return target


def read_prompts(run: str | Path, *, seed: int) -> list[Prompt]:
    """Read the prompts of one seed.

    Parameters
    ----------
    run : str or Path
        RUN.
    seed : int
        Independent repetition.

    Returns
    -------
    list of Prompt
        In the order of the files; empty where none were written.

    Raises
    ------
    DumpError
        A file is damaged or lacks a column.
    """
    folder = place(run) / PROMPTS / f"seed={seed}"
    if not folder.is_dir():
        return []
    return [prompt for path in _files(folder) for prompt in _read(path)]


def check_prompts(run: str | Path) -> Iterator[DumpError]:
    """Find files of prompts that cannot be read, and strays beside them."""
    folder = place(run) / PROMPTS
    if not folder.is_dir():
        return
    for entry in sorted(folder.iterdir()):
        if is_skipped(entry.name):
            continue
        if parse_seed(entry.name) is None or not entry.is_dir():
            yield DumpError(entry, "only folders `seed=<int32>` may lie here")
            continue
        for path in sorted(entry.iterdir()):
            if is_skipped(path.name):
                continue
            try:
                if parse_part(path.name) is None:
                    raise DumpError(path, "only files `part-<rank>-<n>.parquet` may lie here")
                _read(path)
            except DumpError as error:
                yield error


def _files(folder: Path) -> list[Path]:
    """Files of one seed by rank and number."""
    found = {parse_part(path.name): path for path in folder.iterdir()}
    return [path for place, path in sorted((p, f) for p, f in found.items() if p is not None)]


def _read(path: Path) -> list[Prompt]:
    """Prompts of one file."""
    try:
        with open_parquet(path, PROMPT_SCHEMA.names) as file:
            for item in PROMPT_SCHEMA:
                place = file.schema_arrow.get_field_index(item.name)
                if place < 0:
                    raise DumpError(path, "is missing", column=item.name)
                kind = file.schema_arrow.field(place).type
                if not _accepts(item.type, kind):
                    raise DumpError(path, f"must be {item.type}, found {kind}", column=item.name)
            table = file.read(columns=PROMPT_SCHEMA.names)
    except (DumpError, StorageError):
        raise
    except DAMAGE as error:
        raise unreadable(path, error) from error
    for item in PROMPT_SCHEMA:
        values = table.column(item.name).to_pylist()
        if not item.nullable and None in values:
            raise DumpError(path, "must not be NULL", row=values.index(None), column=item.name)
    columns = (table.column(name).to_pylist() for name in PROMPT_SCHEMA.names)
    return [Prompt(*row) for row in zip(*columns, strict=True)]


def _accepts(wanted: pa.DataType, found: pa.DataType) -> bool:
    """Whether a reader can take this type."""
    if pa.types.is_list(wanted):
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        return any(each(found) for each in lists) and pa.types.is_integer(found.value_type)
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found))
    return bool(found == wanted)
