"""Parquet with the encodings that were measured as smallest and fastest for a dump's columns."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import COLUMNS


def parquet_writer(path: Path, layout: pa.Schema) -> pq.ParquetWriter:
    """Open a Parquet file for writing.

    Parameters
    ----------
    path : Path
        The file.
    layout : pyarrow.Schema
        Columns of a dump.

    Returns
    -------
    pyarrow.parquet.ParquetWriter
        Numbers byte-stream-split, zstd at its fastest level, no dictionary but for text,
        statistics of scalars. Its Arrow schema is not stored, for the metadata is added at the
        end.
    """
    texts = [name for name in layout.names if COLUMNS[name].is_text]
    leaf = {
        name: f"{name}.list.element" if COLUMNS[name].is_vector else name for name in layout.names
    }
    numbers = [name for name in layout.names if COLUMNS[name].dtype.kind in "if"]
    return pq.ParquetWriter(
        path,
        layout,
        compression="zstd",
        compression_level=1,
        use_dictionary=texts or False,
        column_encoding={leaf[name]: "BYTE_STREAM_SPLIT" for name in numbers},
        write_statistics=[name for name in layout.names if not COLUMNS[name].is_vector],
        write_page_checksum=True,
        store_schema=False,
    )
