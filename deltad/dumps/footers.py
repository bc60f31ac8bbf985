"""What names and footers tell of a dump, before any row is read."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as brief
from typing import Any, Final

import pyarrow as pa

from .columns import COLUMNS, READINGS, missing_columns
from .errors import DAMAGE, DumpError, first_line, unreadable
from .layout import is_skipped, parse_arm, parse_part, parse_seed
from .metadata import METADATA_KEY, Metadata
from .storage import StorageError, in_order, open_parquet, place
from .unfinished import END_NOTE_KEY, ended_ranks

_AGREED: Final = ("top_k", "vocab_size", "temperature")


@dataclass(frozen=True)
class PartFile:
    """One file of a dump, by what its name and its footer tell.

    Attributes
    ----------
    path : Path
        The file.
    arm, seed : str, int
        Partition.
    rank, part : int
        Its place within the seed.
    rows : int
        Rows stored.
    metadata : Metadata
        From its footer.
    columns : tuple of str
        Columns of the contract that it has, in the contract's order.
    groups : tuple of int
        Rows of every row group, in the file's order.
    ended : bool
        Whether its recording has ended; True where the writer leaves no end note.
    as_written : bool
        Whether it is encoded as `DumpWriter` does it; else some tool has rewritten it.
    """

    path: Path
    arm: str
    seed: int
    rank: int
    part: int
    rows: int
    metadata: Metadata
    columns: tuple[str, ...]
    groups: tuple[int, ...] = ()
    ended: bool = True
    as_written: bool = True


def scan(path: str | Path) -> tuple[list[PartFile], list[DumpError]]:
    """Read every footer of a dump.

    Parameters
    ----------
    path : str or Path
        RUN, a folder or a URL.

    Returns
    -------
    parts : list of PartFile
        Files whose footers obey the contract, sorted.
    problems : list of DumpError
        All that is wrong with names and footers.

    Raises
    ------
    FileNotFoundError
        There is no RUN.
    StorageError
        RUN is a URL that is out of reach.
    """
    run = place(path)
    if not run.exists():
        raise FileNotFoundError(f"{run} does not exist")
    problems: list[DumpError] = []
    parts: list[PartFile] = []
    for found, wrong in in_order(_parts, list(_partitions(run, problems)), run=run):
        parts += found
        problems += wrong
    if not parts and not problems:
        problems.append(DumpError(run, "holds no `arm=<name>` folder, so it is not a dump"))
    for part in parts[1:]:
        problems += _disagreement(parts[0], part)
    problems += _other_starts(parts)
    return parts, problems


def _entries(folder: Path, problems: list[DumpError], *, skipped: bool = False) -> list[Path]:
    """What lies in a folder, sorted; without `skipped` but for names that dataset readers skip."""
    try:
        return sorted(each for each in folder.iterdir() if skipped or not is_skipped(each.name))
    except NotADirectoryError:
        problems.append(DumpError(folder, "must be a folder, found a file"))
    except StorageError:
        raise
    except OSError as error:
        problems.append(DumpError(folder, f"cannot be read ({first_line(error)})"))
    return []


def _partitions(run: Path, problems: list[DumpError]) -> Iterator[tuple[str, int, Path]]:
    """Every arm and seed with its folder, sorted; strays become problems."""
    arms: dict[str, Path] = {}
    for entry in _entries(run, problems):
        arm = parse_arm(entry.name)
        if arm is None or not entry.is_dir():
            problems.append(
                DumpError(
                    entry,
                    "only folders `arm=<name>`, and names that begin with `_`, may lie in a dump",
                )
            )
        elif arm in arms:
            problems.append(DumpError(entry, f"the arm {arm!r} lies in {arms[arm].name} already"))
        else:
            arms[arm] = entry
    for arm, folder in sorted(arms.items()):
        seeds: dict[int, Path] = {}
        entries = _entries(folder, problems)
        if not entries:
            problems.append(
                DumpError(folder, "holds no `seed=<int>` folder: its files are missing")
            )
        for entry in entries:
            seed = parse_seed(entry.name)
            if seed is None or not entry.is_dir():
                problems.append(
                    DumpError(
                        entry, "only folders `seed=<int32>`, without leading zeros, may lie here"
                    )
                )
            else:
                seeds[seed] = entry
        for seed, inner in sorted(seeds.items()):
            yield arm, seed, inner


def _parts(partition: tuple[str, int, Path]) -> tuple[list[PartFile], list[DumpError]]:
    """Files of one seed, sorted; strays, gaps and bad footers become problems."""
    arm, seed, folder = partition
    problems: list[DumpError] = []
    found: dict[tuple[int, int], Path] = {}
    names = []
    for entry in _entries(folder, problems, skipped=True):
        names.append(entry.name)
        if is_skipped(entry.name):
            continue
        place = parse_part(entry.name)
        if place is None or not entry.is_file():
            problems.append(DumpError(entry, "only files `part-<rank>-<n>.parquet` may lie here"))
        else:
            found[place] = entry
    ended = ended_ranks(names)
    problems += _gaps(folder, set(found), ended)
    files = Counter(rank for rank, _ in found)
    parts: list[PartFile] = []
    for (rank, number), path in sorted(found.items()):
        for part in _footer(path, arm, seed, rank, number, problems):
            parts.append(replace(part, ended=part.ended or ended.get(rank, 0) >= files[rank]))
    problems += _missing_ranks(folder, parts, {rank for rank, _ in found})
    return parts, problems


def _gaps(
    folder: Path, found: set[tuple[int, int]], ended: Mapping[int, int]
) -> Iterator[DumpError]:
    """Files that must be there since later ones are, or since an end note counts them."""
    if not found and not ended:
        yield DumpError(
            folder, "holds no part-0-0.parquet: a seed with nothing stored has a file of no rows"
        )
    ranks = {rank for rank, _ in found}
    first = next(rank for rank in itertools.count() if rank not in ranks)
    if ranks and first < max(ranks):
        yield DumpError(
            folder / f"part-{first}-0.parquet",
            f"is missing: ranks are numbered from 0 without gaps, and rank {max(ranks)} is there",
        )
    for rank in sorted(ranks | ended.keys()):
        numbers = {number for one, number in found if one == rank}
        first = next(number for number in itertools.count() if number not in numbers)
        if first >= max(numbers, default=0) and first < ended.get(rank, 0):
            yield DumpError(
                folder / f"part-{rank}-{first}.parquet",
                f"is missing: rank {rank} wrote {ended[rank]} files, "
                f"as the name of _ended-{rank}-{ended[rank]} says",
            )
        elif numbers and first < max(numbers):
            yield DumpError(
                folder / f"part-{rank}-{first}.parquet",
                "is missing: parts are numbered from 0 without gaps, "
                f"and part-{rank}-{max(numbers)}.parquet is there",
            )


def _missing_ranks(folder: Path, parts: list[PartFile], present: set[int]) -> Iterator[DumpError]:
    """Ranks beyond the last one that is there, and files of ranks that there are not."""
    saying = [part for part in parts if part.metadata.ranks is not None]
    for part in saying:
        if part.metadata.ranks is not None and part.rank >= part.metadata.ranks:
            yield DumpError(
                part.path,
                f"is of rank {part.rank}, but its `ranks` says that {part.metadata.ranks} write, "
                "numbered from 0",
                kind="metadata",
            )
    if not saying:
        return
    # A run that was gone on with may have had another number of processes.
    most = max(saying, key=lambda part: part.metadata.ranks or 0)
    first, last = max(present) + 1, (most.metadata.ranks or 0) - 1
    if first <= last:
        # One error for all: `ranks` may be any number.
        absent = f"rank {first}" if first == last else f"the ranks {first} to {last}"
        yield DumpError(
            folder / f"part-{first}-0.parquet",
            f"is missing: `ranks` of {most.path.name} says that {last + 1} ranks write, and "
            f"there is none of {absent}",
        )


def _footer(
    path: Path, arm: str, seed: int, rank: int, number: int, problems: list[DumpError]
) -> Iterator[PartFile]:
    """What a file's footer tells: one PartFile, or problems."""
    try:
        with open_parquet(path) as file:
            rows = file.metadata.num_rows
            groups = tuple(
                file.metadata.row_group(at).num_rows for at in range(file.metadata.num_row_groups)
            )
            as_written = _as_written(file.metadata)
            keys = file.metadata.metadata or {}
            schema = file.schema_arrow
    except StorageError:
        raise
    except DAMAGE as error:
        problems.append(unreadable(path, error))
        return
    if METADATA_KEY not in keys:
        problems.append(
            DumpError(path, "has no metadata under the key `deltad`, so it is no file of a dump")
        )
        return
    try:
        metadata = Metadata.from_json(keys[METADATA_KEY], path)
    except DumpError as error:
        problems.append(error)
        return
    before = len(problems)
    columns = _columns(path, schema, metadata, problems)
    seen = metadata.rows_seen
    problems += [
        DumpError(path, message, column=column, kind="metadata")
        for column, message in _contradictions(metadata, rows, columns)
    ]
    if seen < rows or (metadata.stored_above is None and seen != rows):
        least = "the number of rows stored," if metadata.stored_above is None else "at least"
        problems.append(
            DumpError(path, f"`rows_seen` must be {least} {rows}, found {seen}", kind="metadata")
        )
    if metadata.stored_above is not None and not set(READINGS["pre"]) <= set(columns):
        problems.append(
            DumpError(
                path,
                "`stored` must have the rule 'all' where the policy before the step was not read",
                kind="metadata",
            )
        )
    if len(problems) == before:
        ended = END_NOTE_KEY not in keys  # otherwise its end note tells
        yield PartFile(
            path, arm, seed, rank, number, rows, metadata, columns, groups, ended, as_written
        )


def _contradictions(
    metadata: Metadata, rows: int, columns: Collection[str]
) -> Iterator[tuple[str | None, str]]:
    """What the rules in a file's metadata say against each other, its rows or its columns."""
    outside = metadata.stored_outside
    if outside is not None and not rows <= outside <= metadata.rows_seen:
        yield (
            None,
            "`outside` of `stored` must lie between the rows stored, all of which are outside, "
            f"and `rows_seen`: in [{rows}, {metadata.rows_seen}], found {outside}",
        )
    near, derived = metadata.near, metadata.derived_divergence
    if near is not None and derived is not None and near.divergence != derived:
        yield (
            None,
            "`vectors` and `derived` must name one divergence, found "
            f"{near.divergence} and {derived}",
        )
    share = (metadata.sampling or {}).get("sequences", 1)
    if rows and share < 1 and "weight" not in columns:
        yield (
            "weight",
            f"is missing, though `sampling` says that a share of {share:g} of the sequences was "
            "recorded",
        )


def _as_written(metadata: Any) -> bool:
    """Whether a file is encoded as `DumpWriter` does it, which no other tool does by itself."""
    if not metadata.num_row_groups:
        return True
    group = metadata.row_group(0)
    return all(
        "BYTE_STREAM_SPLIT" in group.column(at).encodings
        for at in range(group.num_columns)
        if group.column(at).physical_type in ("FLOAT", "DOUBLE", "INT32")
    )


def _columns(
    path: Path, schema: pa.Schema, metadata: Metadata, problems: list[DumpError]
) -> tuple[str, ...]:
    """Names of the contract's columns that a file has; wrong ones become problems."""
    present = []
    missing = missing_columns(name for name in COLUMNS if schema.get_all_field_indices(name))
    for name, column in COLUMNS.items():
        if column.derived and metadata.derived_divergence is None:
            continue  # of other definitions, or someone's own
        places = schema.get_all_field_indices(name)
        message = None
        if not places:
            message = "is missing" if name in missing else None
        elif len(places) > 1:
            message = f"must be there once, found {len(places)} times"
        elif not column.accepts(kind := schema.field(places[0]).type, metadata.top_k):
            message = f"must be {column.expected(metadata.top_k)}, found {kind}"
        else:
            present.append(name)
        if message is not None:
            problems.append(DumpError(path, message, column=name, kind="column"))
    return tuple(present)


def _disagreement(first: PartFile, other: PartFile) -> Iterator[DumpError]:
    """Values that all files of a dump share."""
    for key in _AGREED:
        here, there = getattr(other.metadata, key), getattr(first.metadata, key)
        if here != there:
            yield DumpError(
                other.path,
                f"`{key}` must be the same in all files, found {here}, but {there} in {first.path}",
                kind="metadata",
            )


def _other_starts(parts: list[PartFile]) -> Iterator[DumpError]:
    """Files of recipes that started from another policy than the first one that says from which."""
    for part in parts:
        if "start" in part.metadata.extra and _start_policy(part) is None:
            yield DumpError(
                part.path,
                "`start` must be an object with `policy_sha256`, a string, found "
                f"{brief(part.metadata.extra['start'])}",
                kind="metadata",
            )
    saying = [(part, start) for part in parts if (start := _start_policy(part)) is not None]
    for part, start in saying[1:]:
        first, expected = saying[0]
        if start != expected:
            yield DumpError(
                part.path,
                f"started from another policy than {first.path}: `policy_sha256` of its `start` is "
                f"{start}, there {expected}; such seeds do not belong in one dump",
                kind="metadata",
            )


def _start_policy(part: PartFile) -> str | None:
    """Hash of the policy that a recipe's seeds start from; None where the file does not say."""
    start = part.metadata.extra.get("start")
    found = start.get("policy_sha256") if isinstance(start, dict) else None
    return found if isinstance(found, str) else None
