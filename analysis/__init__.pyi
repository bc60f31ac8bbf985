from .calibration import Calibration as Calibration
from .calibration import calibrate as calibrate
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .condition_table import ConditionTable as ConditionTable
from .condition_table import condition_table as condition_table
from .conditions import CONDITIONS as CONDITIONS
from .engine import LocalEngine as LocalEngine
from .export import PROTOCOL_COLUMNS as PROTOCOL_COLUMNS
from .export import RATE_COLUMNS as RATE_COLUMNS
from .figures import draw_contracting as draw_contracting
from .figures import draw_delta_d as draw_delta_d
from .figures import draw_paired_rates as draw_paired_rates
from .figures import figure4 as figure4
from .figures import save_figure as save_figure
from .forms.calibration import CALIBRATION_COLUMNS as CALIBRATION_COLUMNS
from .forms.comparison import COMPARISON_COLUMNS as COMPARISON_COLUMNS
from .forms.conditions import CONDITION_COLUMNS as CONDITION_COLUMNS
from .forms.ladder import LADDER_TABLE_COLUMNS as LADDER_TABLE_COLUMNS
from .forms.sweeps import SWEEP_COLUMNS as SWEEP_COLUMNS
from .headline import Headline as Headline
from .headline import read_headline as read_headline
from .ladder import LadderTable as LadderTable
from .ladder_counting import ladder_table as ladder_table
from .partial_files import Share as Share
from .partials import merge_partials as merge_partials
from .partials import write_partial as write_partial
from .power import POWER_COLUMNS as POWER_COLUMNS
from .power import PowerTable as PowerTable
from .power import power_table as power_table
from .question import Question as Question
from .question import QuestionError as QuestionError
from .rates import RateTable as RateTable
from .ray_engine import EngineError as EngineError
from .ray_engine import RayEngine as RayEngine
from .sweeps import Sweep as Sweep
from .sweeps import sweep as sweep
from .tables import ProtocolTable as ProtocolTable
from .tables import protocol_table as protocol_table
from .tables import rate_table as rate_table
from .text import as_text as as_text
from .text import protocol_text as protocol_text
from .text import rate_text as rate_text
from .tokens import TOKEN_COLUMNS as TOKEN_COLUMNS
from .tokens import TokenTable as TokenTable
from .training import TrainingTable as TrainingTable
from .training import training_table as training_table
from .watch import StepTable as StepTable

__all__ = [
    "CALIBRATION_COLUMNS",
    "COMPARISON_COLUMNS",
    "CONDITIONS",
    "CONDITION_COLUMNS",
    "LADDER_TABLE_COLUMNS",
    "POWER_COLUMNS",
    "PROTOCOL_COLUMNS",
    "RATE_COLUMNS",
    "SWEEP_COLUMNS",
    "TOKEN_COLUMNS",
    "Calibration",
    "Comparison",
    "ConditionTable",
    "EngineError",
    "Headline",
    "LadderTable",
    "LocalEngine",
    "PowerTable",
    "ProtocolTable",
    "Question",
    "QuestionError",
    "RateTable",
    "RayEngine",
    "Share",
    "StepTable",
    "Sweep",
    "TokenTable",
    "TrainingTable",
    "as_text",
    "calibrate",
    "compare",
    "condition_table",
    "draw_contracting",
    "draw_delta_d",
    "draw_paired_rates",
    "figure4",
    "ladder_table",
    "merge_partials",
    "power_table",
    "protocol_table",
    "protocol_text",
    "rate_table",
    "rate_text",
    "read_headline",
    "save_figure",
    "sweep",
    "training_table",
    "write_partial",
]
