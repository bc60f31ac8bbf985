"""What every result of an analysis can do: be read, be kept as a file, be shown in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType


class Result(ABC):
    """A computed answer; its forms are made from it when they are asked for.

    A command prints `text`, or writes one of the other forms; a notebook shows `_repr_html_`.
    """

    @abstractmethod
    def text(self) -> RenderableType:
        """What a person reads at a terminal: rates with counts and intervals, and the method."""

    @abstractmethod
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """The same as columns of equal length; NaN where a number is undefined."""

    @abstractmethod
    def to_json_object(self) -> dict[str, Any]:
        """Everything as plain objects, `format` first; NaN is None."""

    def figure(self) -> Figure:
        """Draw it.

        Raises
        ------
        NotImplementedError
            There is no figure of this.
        """
        raise NotImplementedError(f"there is no figure of a {type(self).__name__}")

    def to_frame(self) -> pd.DataFrame:
        """The columns as a DataFrame."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns()))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A dataclass would list every count of every seed.
        cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def __str__(self) -> str:
        from .text import as_text

        return as_text(self.text())

    def _repr_html_(self) -> str:
        """What Jupyter shows: the text's tables as tables, in the page's own colours."""
        from .html import as_html

        return as_html(self.text())
