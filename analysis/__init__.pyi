from .export import PROTOCOL_COLUMNS as PROTOCOL_COLUMNS
from .export import RATE_COLUMNS as RATE_COLUMNS
from .figures import draw_contracting as draw_contracting
from .figures import draw_delta_d as draw_delta_d
from .figures import draw_paired_rates as draw_paired_rates
from .figures import figure4 as figure4
from .figures import save_figure as save_figure
from .headline import Headline as Headline
from .headline import read_headline as read_headline
from .power import POWER_COLUMNS as POWER_COLUMNS
from .power import PowerTable as PowerTable
from .power import power_table as power_table
from .question import Question as Question
from .question import QuestionError as QuestionError
from .rates import RateTable as RateTable
from .tables import ProtocolTable as ProtocolTable
from .tables import protocol_table as protocol_table
from .tables import rate_table as rate_table
from .text import as_text as as_text
from .text import protocol_text as protocol_text
from .text import rate_text as rate_text
from .tokens import TOKEN_COLUMNS as TOKEN_COLUMNS
from .tokens import TokenTable as TokenTable

__all__ = [
    "POWER_COLUMNS",
    "PROTOCOL_COLUMNS",
    "RATE_COLUMNS",
    "TOKEN_COLUMNS",
    "Headline",
    "PowerTable",
    "ProtocolTable",
    "Question",
    "QuestionError",
    "RateTable",
    "TokenTable",
    "as_text",
    "draw_contracting",
    "draw_delta_d",
    "draw_paired_rates",
    "figure4",
    "power_table",
    "protocol_table",
    "protocol_text",
    "rate_table",
    "rate_text",
    "read_headline",
    "save_figure",
]
