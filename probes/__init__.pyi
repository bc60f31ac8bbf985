from .arms import ZERO_STEP as ZERO_STEP
from .arms import Snapshot as Snapshot
from .arms import branch as branch
from .behavior import ResponseTokens as ResponseTokens
from .errors import ProbeError as ProbeError
from .ladder import LADDER_COLUMNS as LADDER_COLUMNS
from .ladder import Ladder as Ladder
from .microbatch import MicroBatch as MicroBatch
from .microbatch import Rows as Rows
from .probe import UpdateProbe as UpdateProbe
from .readout import Readout as Readout
from .recorder import Recorder as Recorder

__all__ = [
    "LADDER_COLUMNS",
    "ZERO_STEP",
    "Ladder",
    "MicroBatch",
    "ProbeError",
    "Readout",
    "Recorder",
    "ResponseTokens",
    "Rows",
    "Snapshot",
    "UpdateProbe",
    "branch",
]
