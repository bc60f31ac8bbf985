"""Dumps into tables, statistics and figures; never needs torch.

Names are imported when they are first used: a table needs no pandas and only a figure needs
matplotlib.
"""

from __future__ import annotations

if __name__ != "deltad.analysis":
    raise ImportError(
        f"this folder is the package `deltad.analysis`, imported here as {__name__!r}: "
        "run `pip install -e .` in the repository and `import deltad.analysis`"
    )

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .export import PROTOCOL_COLUMNS as PROTOCOL_COLUMNS
    from .export import RATE_COLUMNS as RATE_COLUMNS
    from .figures import draw_contracting as draw_contracting
    from .figures import draw_delta_d as draw_delta_d
    from .figures import draw_paired_rates as draw_paired_rates
    from .figures import figure4 as figure4
    from .figures import save_figure as save_figure
    from .question import Question as Question
    from .question import QuestionError as QuestionError
    from .rates import RateTable as RateTable
    from .tables import ProtocolTable as ProtocolTable
    from .tables import protocol_table as protocol_table
    from .tables import rate_table as rate_table
    from .text import protocol_text as protocol_text
    from .text import rate_text as rate_text
    from .tokens import TOKEN_COLUMNS as TOKEN_COLUMNS
    from .tokens import TokenTable as TokenTable

_HOME = {
    "PROTOCOL_COLUMNS": "export",
    "RATE_COLUMNS": "export",
    "ProtocolTable": "tables",
    "Question": "question",
    "QuestionError": "question",
    "RateTable": "rates",
    "TOKEN_COLUMNS": "tokens",
    "TokenTable": "tokens",
    "draw_contracting": "figures",
    "draw_delta_d": "figures",
    "draw_paired_rates": "figures",
    "figure4": "figures",
    "protocol_table": "tables",
    "protocol_text": "text",
    "rate_table": "tables",
    "rate_text": "text",
    "save_figure": "figures",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
