from .backends import BackendError as BackendError
from .backends import LocalBackend as LocalBackend
from .backends import RayBackend as RayBackend
from .figures import draw_contracting as draw_contracting
from .figures import draw_delta_d as draw_delta_d
from .figures import draw_paired_rates as draw_paired_rates
from .figures import figure4 as figure4
from .figures import save_figure as save_figure
from .question import Question as Question
from .question import QuestionError as QuestionError
from .result import Column as Column
from .result import Result as Result
from .shards import Shards as Shards
from .shards import ShardWriter as ShardWriter
from .shards import ShardWritten as ShardWritten
from .shards import Share as Share
from .tables.compare import COMPARISON_COLUMNS as COMPARISON_COLUMNS
from .tables.compare import CONDITION_COLUMNS as CONDITION_COLUMNS
from .tables.compare import SWEEP_COLUMNS as SWEEP_COLUMNS
from .tables.compare import Comparison as Comparison
from .tables.compare import ConditionTable as ConditionTable
from .tables.compare import Sweep as Sweep
from .tables.compare import compare as compare
from .tables.compare import condition_table as condition_table
from .tables.compare import sweep as sweep
from .tables.ladder import CALIBRATION_COLUMNS as CALIBRATION_COLUMNS
from .tables.ladder import LADDER_TABLE_COLUMNS as LADDER_TABLE_COLUMNS
from .tables.ladder import Calibration as Calibration
from .tables.ladder import LadderTable as LadderTable
from .tables.ladder import calibrate as calibrate
from .tables.ladder import ladder_table as ladder_table
from .tables.power import POWER_COLUMNS as POWER_COLUMNS
from .tables.power import PowerTable as PowerTable
from .tables.power import power_table as power_table
from .tables.rates import PROTOCOL_COLUMNS as PROTOCOL_COLUMNS
from .tables.rates import RATE_COLUMNS as RATE_COLUMNS
from .tables.rates import KeepEffect as KeepEffect
from .tables.rates import ProtocolTable as ProtocolTable
from .tables.rates import RateTable as RateTable
from .tables.rates import protocol_table as protocol_table
from .tables.rates import rate_table as rate_table
from .tables.steps import StepTable as StepTable
from .tables.training import TrainingTable as TrainingTable
from .tables.training import training_table as training_table
from .tokens import TOKEN_COLUMNS as TOKEN_COLUMNS
from .tokens import TokenTable as TokenTable
from .values import CONDITIONS as CONDITIONS

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
    "BackendError",
    "Calibration",
    "Column",
    "Comparison",
    "ConditionTable",
    "KeepEffect",
    "LadderTable",
    "LocalBackend",
    "PowerTable",
    "ProtocolTable",
    "Question",
    "QuestionError",
    "RateTable",
    "RayBackend",
    "Result",
    "ShardWriter",
    "ShardWritten",
    "Shards",
    "Share",
    "StepTable",
    "Sweep",
    "TokenTable",
    "TrainingTable",
    "calibrate",
    "compare",
    "condition_table",
    "draw_contracting",
    "draw_delta_d",
    "draw_paired_rates",
    "figure4",
    "ladder_table",
    "power_table",
    "protocol_table",
    "rate_table",
    "save_figure",
    "sweep",
    "training_table",
]
