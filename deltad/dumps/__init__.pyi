from .background import BackgroundWriter as BackgroundWriter
from .background import RecordingError as RecordingError
from .batch import Batch as Batch
from .column import Column as Column
from .columns import COLUMNS as COLUMNS
from .columns import DERIVED as DERIVED
from .columns import KEY as KEY
from .columns import OPTIONAL as OPTIONAL
from .columns import READINGS as READINGS
from .columns import REQUIRED as REQUIRED
from .columns import VECTORS as VECTORS
from .columns import column_reference as column_reference
from .columns import derived_names as derived_names
from .columns import schema as schema
from .derived import arithmetic as arithmetic
from .derived import derive as derive
from .derived import derived_metadata as derived_metadata
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
from .rules import DERIVED_VERSION as DERIVED_VERSION
from .rules import Near as Near
from .rules import Pair as Pair
from .tokens import batch_support as batch_support
from .tokens import batch_tokens as batch_tokens
from .tokens import scalar_tokens as scalar_tokens
from .tokens import token_columns as token_columns
from .unfinished import Unfinished as Unfinished
from .unfinished import is_recorded as is_recorded
from .unfinished import part_numbers as part_numbers
from .unfinished import unfinished as unfinished
from .validate import check_dump as check_dump
from .values import check_batch as check_batch
from .values import findings as findings
from .writer import DumpWriter as DumpWriter

__all__ = [
    "COLUMNS",
    "DERIVED",
    "DERIVED_VERSION",
    "FORMAT",
    "KEY",
    "METADATA_KEY",
    "OPTIONAL",
    "PROMPT_SCHEMA",
    "READINGS",
    "REQUIRED",
    "VECTORS",
    "BackgroundWriter",
    "Batch",
    "Column",
    "Dump",
    "DumpError",
    "DumpWriter",
    "Finding",
    "Metadata",
    "Near",
    "Pair",
    "PartFile",
    "Problem",
    "Prompt",
    "RecordingError",
    "Unfinished",
    "arithmetic",
    "batch_support",
    "batch_tokens",
    "check_batch",
    "check_dump",
    "column_reference",
    "derive",
    "derived_metadata",
    "derived_names",
    "findings",
    "is_recorded",
    "part_batches",
    "part_numbers",
    "read_prompts",
    "scalar_tokens",
    "schema",
    "token_columns",
    "unfinished",
    "write_prompts",
]
