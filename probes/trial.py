"""Whether a model's forward may be cut: tried once, on half of the first micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .cutting import Grid, Rows, plan_cut
from .errors import ProbeError, first_line
from .forward import Forward
from .plan import Plan
from .readout import Readout

Make = Callable[[Rows, Plan], tuple[Tensor, Readout]]
"""Makes a cut forward: hidden states of some rows, and what is read from them."""

# Root mean square of what may change in a log-prob. Rounding of other shapes stays far below; a
# dropout mask that is drawn anew, a batch statistic or attention to later tokens is far above.
_ALLOWED: Final = {"double": 1e-8, "single": 1e-3, "half": 0.25}
_ALLOWED_TF32: Final = 2e-2

_FAILURES: Final = (
    ProbeError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError,
    NotImplementedError, ImportError,
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes
    ----------
    cut : bool
        Whether the forward may be cut.
    shared : bool
        Whether prompts may be forwarded once for several sequences.
    noise, rms : float
        Largest and root mean square change of a log-prob, in nats.
    repeatable : bool
        Whether the same cut forward made twice gave the same bits.
    reason : str
        Why not everything that was asked for is done; else empty.
    """

    cut: bool
    shared: bool = False
    noise: float = 0.0
    rms: float = 0.0
    repeatable: bool = False
    reason: str = ""


def try_cut(
    forward: Forward,
    grid: Grid,
    whole: Readout,
    make: Make,
    *,
    share_prompts: bool,
    dtypes: set[torch.dtype],
) -> Trial:
    """Cut a forward in every way, with the weights of before the step, and compare.

    Parameters
    ----------
    forward : Forward
        The whole one.
    grid : Grid
        Of its micro-batch, which has rows.
    whole : Readout
        At all rows, from the whole forward.
    make : callable
        Makes a cut forward.
    share_prompts : bool
        Whether to try that too; where it fails the forward is tried without.
    dtypes : set of torch.dtype
        All that numbers of the forward may be rounded to.

    Returns
    -------
    Trial
        No error is raised but that of memory.
    """
    if dropout := _dropout(forward.call.module):
        return Trial(False, reason=f"{dropout} draws other masks for a cut forward")
    allowed, reasons = _allowed(dtypes), []
    for shared in (True, False) if share_prompts else (False,):
        rows = _half(grid, shared)
        try:
            # As if a forward cost nothing, so that all that may be done is.
            plan = plan_cut(forward, grid, rows, share_prompts=shared, overhead=0)
            if shared and not plan.shares:
                reasons.append("no two sequences of the first micro-batch begin alike")
                continue
            hidden, read = make(rows, plan)
            once_more, _ = make(rows, plan)
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            reasons.append(first_line(error))
            continue
        change = (read.logprobs - whole.logprobs[torch.from_numpy(rows)].to(read.logprobs)).abs()
        change = change[~change.isnan()]
        rms = float(change.square().mean().sqrt()) if change.numel() else 0.0
        if not rms <= allowed:
            reasons.append(
                f"it gives other log-probs than the whole one (by {rms:.2g} nats): what the model "
                "says of a token depends on other sequences or later tokens"
            )
            continue
        noise = float(change.max()) if change.numel() else 0.0
        return Trial(True, shared, noise, rms, torch.equal(hidden, once_more), "; ".join(reasons))
    return Trial(False, reason="; ".join(reasons))


def _half(grid: Grid, shared: bool) -> Rows:
    """Rows of every other sequence, or of half of the prompts, up to their middle."""
    sequences = np.unique(grid.row)
    if shared and grid.group is not None:
        groups, counts = np.unique(grid.group[sequences], return_counts=True)
        first = groups[np.argsort(-counts, kind="stable")][: max(1, len(groups) // 2)]
        chosen: NDArray[np.int64] = sequences[np.isin(grid.group[sequences], first)]
    else:
        chosen = sequences[::2]
    found = np.zeros(len(grid.row), np.bool_)
    for each in chosen:
        mine = grid.row == each
        found |= mine & (grid.column <= np.median(grid.column[mine]))
    return np.flatnonzero(found)


def _allowed(dtypes: set[torch.dtype]) -> float:
    """Root mean square change of a log-prob that counts as rounding, in nats."""
    floating = {each for each in dtypes if each.is_floating_point}
    if any(each.itemsize < 4 for each in floating):
        return _ALLOWED["half"]
    if all(each == torch.float64 for each in floating):
        return _ALLOWED["double"]
    mkldnn: Any = torch.backends.mkldnn  # its stubs leave `matmul` out
    switches = (mkldnn.matmul, torch.backends.cuda.matmul)
    if any(each.fp32_precision in ("tf32", "bf16") for each in switches):
        return _ALLOWED_TF32
    return _ALLOWED["single"]


def _dropout(module: nn.Module) -> str:
    """Name of something that drops at random in the mode of training; empty for nothing."""
    for name, part in module.named_modules():
        if not part.training:
            continue
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            return f"dropout in {name or type(part).__name__}"
        rate = getattr(part, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            return f"attention dropout in {name or type(part).__name__}"
    return ""
