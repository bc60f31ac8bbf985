"""One column of a dump, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

LIST_SUFFIX: Final = "[K]"
"""Ends the type of a column that holds K values a row."""


@dataclass(frozen=True)
class Column:
    """One column of the dump.

    Attributes
    ----------
    name : str
        As in the file.
    type : str
        NumPy's name of the value's type, "string" for text; "[K]" behind it for a fixed-size
        list of K such values.
    unit : str
        Empty for a number without unit.
    required : bool
        Whether a file must have it; see `reading` for the exception.
    meaning : str
        For the reference.
    rule : str
        Which values are possible; `deltad.dumps.values` has a check by this name.
    shared : bool
        Whether rows of the same token agree on it in all arms.
    before : str, optional
        The column of the state before the step that this one equals after a step of zero
        length.
    nullable : bool
        Whether a row may have none: NULL in the file, NaN in arrays.
    reading : str
        Of the columns that one reading of the policy fills, "pre" or "post": a file may be
        without that reading, and then has none of its columns.
    derived : bool
        Whether `DumpWriter` fills it from the others; see `deltad.dumps.derived`.
    """

    name: str
    type: str
    unit: str
    required: bool
    meaning: str
    rule: str
    shared: bool = True
    before: str | None = None
    nullable: bool = False
    reading: str = ""
    derived: bool = False

    @property
    def is_vector(self) -> bool:
        """Whether a row holds K values."""
        return self.type.endswith(LIST_SUFFIX)

    @property
    def is_text(self) -> bool:
        """Whether a value is a string."""
        return self.type == "string"

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type of one value; objects for text."""
        return np.dtype(object if self.is_text else self.type.removesuffix(LIST_SUFFIX))

    def arrow_type(self, top_k: int, *, nullable: bool = False) -> pa.DataType:
        """Arrow's type as a writer gives it."""
        if self.is_text:
            return pa.dictionary(pa.int32(), pa.string())
        value = pa.from_numpy_dtype(self.dtype)
        if not self.is_vector:
            return value
        return pa.list_(pa.field("element", value, nullable=nullable), top_k)

    def accepts(self, found: pa.DataType, top_k: int) -> bool:
        """Whether a reader can take this Arrow type; the length of lists is seen by row."""
        if self.is_text:
            if pa.types.is_dictionary(found):
                found = found.value_type
            return bool(
                pa.types.is_string(found)
                or pa.types.is_large_string(found)
                or pa.types.is_string_view(found)
            )
        if self.is_vector:
            if pa.types.is_fixed_size_list(found):
                if found.list_size != top_k:
                    return False
            elif not (pa.types.is_list(found) or pa.types.is_large_list(found)):
                return False
            found = found.value_type
        if self.dtype.kind == "i":
            return bool(pa.types.is_integer(found) or pa.types.is_float64(found))
        if self.dtype.kind == "f":
            return bool(pa.types.is_float32(found) or pa.types.is_float64(found))
        return bool(pa.types.is_boolean(found))

    def expected(self, top_k: int) -> str:
        """Say the type."""
        if self.is_text:
            return "string or dictionary<string>"
        if self.is_vector:
            return f"list<{self.dtype.name}>[{top_k}]"
        return str(self.dtype.name)
