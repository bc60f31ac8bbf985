from .arms import ZERO_STEP as ZERO_STEP
from .arms import Snapshot as Snapshot
from .arms import branch as branch
from .behavior import ResponseTokens as ResponseTokens
from .engines import EngineError as EngineError
from .engines import EngineResponse as EngineResponse
from .engines.packing import response_tokens as response_tokens
from .errors import ProbeError as ProbeError
from .ladder import LADDER_COLUMNS as LADDER_COLUMNS
from .ladder import Ladder as Ladder
from .microbatch import MicroBatch as MicroBatch
from .microbatch import Rows as Rows
from .monitor import Monitor as Monitor
from .probe import UpdateProbe as UpdateProbe
from .readout import Readout as Readout
from .recorder import Recorder as Recorder
from .sinks import JsonLines as JsonLines
from .sinks import Sink as Sink
from .sinks import TensorBoard as TensorBoard
from .sinks import Trackio as Trackio
from .sinks import Wandb as Wandb

__all__ = [
    "LADDER_COLUMNS",
    "ZERO_STEP",
    "EngineError",
    "EngineResponse",
    "JsonLines",
    "Ladder",
    "MicroBatch",
    "Monitor",
    "ProbeError",
    "Readout",
    "Recorder",
    "ResponseTokens",
    "Rows",
    "Sink",
    "Snapshot",
    "TensorBoard",
    "Trackio",
    "UpdateProbe",
    "Wandb",
    "branch",
    "response_tokens",
]
