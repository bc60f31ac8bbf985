"""The dump contract: columns, metadata, writing, reading, checking.

Names are imported when they are first used, so that who needs the metadata alone does not
wait for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batch import Batch as Batch
    from .columns import COLUMNS as COLUMNS
    from .columns import KEY as KEY
    from .columns import OPTIONAL as OPTIONAL
    from .columns import REQUIRED as REQUIRED
    from .columns import VECTORS as VECTORS
    from .columns import Column as Column
    from .columns import column_reference as column_reference
    from .columns import schema as schema
    from .errors import DumpError as DumpError
    from .errors import Problem as Problem
    from .finding import Finding as Finding
    from .footers import PartFile as PartFile
    from .metadata import FORMAT as FORMAT
    from .metadata import METADATA_KEY as METADATA_KEY
    from .metadata import Metadata as Metadata
    from .prompts import PROMPT_SCHEMA as PROMPT_SCHEMA
    from .prompts import Prompt as Prompt
    from .prompts import read_prompts as read_prompts
    from .prompts import write_prompts as write_prompts
    from .reader import Dump as Dump
    from .reader import part_batches as part_batches
    from .tokens import batch_support as batch_support
    from .tokens import batch_tokens as batch_tokens
    from .tokens import scalar_tokens as scalar_tokens
    from .tokens import token_columns as token_columns
    from .validate import check_dump as check_dump
    from .values import check_batch as check_batch
    from .values import findings as findings
    from .writer import DumpWriter as DumpWriter
    from .writer import part_numbers as part_numbers

_HOME = {
    "Batch": "batch",
    "COLUMNS": "columns",
    "Column": "columns",
    "KEY": "columns",
    "OPTIONAL": "columns",
    "REQUIRED": "columns",
    "VECTORS": "columns",
    "column_reference": "columns",
    "schema": "columns",
    "DumpError": "errors",
    "Problem": "errors",
    "FORMAT": "metadata",
    "METADATA_KEY": "metadata",
    "Metadata": "metadata",
    "PROMPT_SCHEMA": "prompts",
    "Prompt": "prompts",
    "read_prompts": "prompts",
    "write_prompts": "prompts",
    "Dump": "reader",
    "PartFile": "footers",
    "part_batches": "reader",
    "batch_support": "tokens",
    "batch_tokens": "tokens",
    "scalar_tokens": "tokens",
    "token_columns": "tokens",
    "check_dump": "validate",
    "Finding": "finding",
    "check_batch": "values",
    "findings": "values",
    "DumpWriter": "writer",
    "part_numbers": "writer",
}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # a type checker shall not believe that every name exists

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
