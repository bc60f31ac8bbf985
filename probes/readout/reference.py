"""The plain readout: float32 tiles under a running maximum, ids read from the tiles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltad.probes.sharded.vocab import VocabShard

from .checks import check_options, check_shapes
from .precision import exact_products
from .result import Readout

# A z this far below the maximum has weight 0 in float64; it keeps 0 · −∞ out of the entropy.
_FLOOR = -1e4


@torch.no_grad()
def reference_readout(
    hidden: Tensor,
    head_weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    token_chunk: int = 512,
    vocab_chunk: int = 4096,
    low_rank: Sequence[tuple[Tensor, Tensor]] = (),
    shard: VocabShard | None = None,
    exclusive: bool | None = None,
) -> Readout:
    r"""Log-probs at given ids, logsumexp, entropy and collision of softmax(z / T), plainly.

    What `readout` is held against, and falls back on where it cannot do.

    .. math:: z = c \tanh\!\big(s\,(W h + b) / c\big), \qquad
              \log\pi_j = z_j / T - \log \textstyle\sum_i \exp(z_i / T)

    with s = `scale`, c = `softcap` (without it z = s (W h + b)) and T = `temperature`. With
    `low_rank` pairs (x, B) the logits gain B x before s.

    Parameters
    ----------
    hidden : Tensor, shape (token, hidden)
        What enters the head at each position, any floating dtype.
    head_weight : Tensor, shape (vocab, hidden)
        W, any floating dtype.
    ids : Tensor of int, shape (token, id)
        Where the log-probs are wanted; negative ids are padding.
    bias : Tensor, shape (vocab,), optional
        b.
    scale : float
        s, what the model multiplies its logits by.
    softcap : float, optional
        c, the bound of the logits.
    temperature : float
        T > 0.
    token_chunk, vocab_chunk : int
        Sides of a tile; no more than two tiles of logits exist at a time.
    low_rank : sequence of (Tensor, Tensor)
        x of shape (token, rank) and B of shape (vocab, rank) of each adapter of the head.
    shard : VocabShard, optional
        `head_weight`, `bias` and each B hold the rows of some ids only, and the other ranks of
        its group the rest; all of them call this together, with the same hidden states and ids.
    exclusive : bool, optional
        As in `readout`.

    Returns
    -------
    Readout
        Of shape (token,) and (token, id).

    Raises
    ------
    ProbeError
        Shapes that do not match, an id that the head has no row for, or a temperature, chunk
        or softcap that is not positive.

    Notes
    -----
    Products, exponentials and sums within a tile are float32 (float64 where hidden states or
    head are), whatever the autocast state and the precision set for float32 matrix products;
    across tiles everything is float64, with a running maximum. For float32 inputs the error
    against float64 throughout is of the order of 1e-6 nats, set by the rounding of z itself.

    Examples
    --------
    Two words with logits log 3 and 0, so probabilities ¾ and ¼:

    >>> import math
    >>> r = reference_readout(
    ...     torch.tensor([[1.0]]), torch.tensor([[math.log(3)], [0.0]]), torch.tensor([[1, 0]])
    ... )
    >>> [round(p, 6) for p in r.logprobs.exp()[0].tolist()], round(r.collision.item(), 6)
    ([0.25, 0.75], 0.625)
    """
    rows_of_all = head_weight.shape[0] if shard is None else shard.total
    check_shapes(hidden, head_weight, ids, rows_of_all, bias)
    check_options(softcap, temperature, token_chunk, vocab_chunk, exclusive=exclusive)
    tokens, vocab = hidden.shape[0], head_weight.shape[0]
    offset = 0 if shard is None else shard.first
    sums = _Sums(tokens, ids, hidden.device)
    operands = (hidden, head_weight, *itertools.chain.from_iterable(low_rank))
    with exact_products(*operands, exclusive=exclusive) as dtype:
        sides = min(token_chunk, tokens) * min(vocab_chunk, vocab)
        logits, weights = (torch.empty(sides, dtype=dtype, device=hidden.device) for _ in range(2))
        for first in range(0, vocab, vocab_chunk):
            rows = head_weight[first : first + vocab_chunk].to(dtype)
            for start in range(0, tokens, token_chunk):
                part = slice(start, min(start + token_chunk, tokens))
                shape = (part.stop - start, rows.shape[0])
                tile = logits[: shape[0] * shape[1]].view(shape)
                torch.mm(hidden[part].to(dtype), rows.t(), out=tile)
                for low, high in low_rank:
                    tile.addmm_(
                        low[part].to(dtype), high[first : first + vocab_chunk].to(dtype).t()
                    )
                if bias is not None:
                    tile += bias[first : first + vocab_chunk].to(dtype)
                if scale != 1.0:
                    tile *= scale
                if softcap is not None:
                    tile.div_(softcap).tanh_().mul_(softcap)
                if temperature != 1.0:
                    tile /= temperature
                sums.add(part, offset + first, tile, weights[: tile.numel()].view(shape))
    if shard is not None:
        sums.take(shard)
    return sums.result()


class _Sums:
    """Running maximum m and Σ e^(z−m), Σ e^(2(z−m)), Σ e^(z−m) (z−m) over vocabulary tiles."""

    def __init__(self, tokens: int, ids: Tensor, device: torch.device) -> None:
        wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.ids = ids
        self.top = torch.full((tokens,), -torch.inf, **wide)
        self.total, self.squares, self.weighted = (torch.zeros(tokens, **wide) for _ in range(3))
        self.picked = torch.full(ids.shape, torch.nan, **wide)

    def add(self, part: slice, first: int, tile: Tensor, weights: Tensor) -> None:
        """Take one tile of logits, which is overwritten; `weights` is room of its shape."""
        local = self.ids[part] - first
        inside = (local >= 0) & (local < tile.shape[1])
        logits = tile.gather(1, local.clamp(0, tile.shape[1] - 1)).double()
        self.picked[part] = torch.where(inside, logits, self.picked[part])

        before = self.top[part]
        top = torch.maximum(before, tile.amax(1).double())
        # The first tile comes with m = −∞ and sums of 0, which no shift changes.
        shift = torch.where(before.isfinite(), before - top, torch.zeros_like(top))
        tile -= top[:, None].to(tile.dtype)
        torch.exp(tile, out=weights)
        total = self.total[part]
        self.weighted[part] = (self.weighted[part] + total * shift) * shift.exp() + (
            tile.clamp_(min=_FLOOR).mul_(weights).sum(1).double()
        )
        self.total[part] = total * shift.exp() + weights.sum(1).double()
        self.squares[part] = self.squares[part] * (2 * shift).exp() + (
            weights.square_().sum(1).double()
        )
        self.top[part] = top

    def take(self, shard: VocabShard) -> None:
        """Add up what the ranks found, each among its own ids."""
        self.top, self.total, self.squares, self.weighted, self.picked = shard.combine(
            self.top, self.total, self.squares, self.weighted, self.picked
        )

    def result(self) -> Readout:
        """Normalize."""
        log_total = self.total.log()
        logsumexp = self.top + log_total
        return Readout(
            logsumexp=logsumexp,
            logprobs=self.picked - logsumexp[:, None],
            # Rounding can carry the entropy of a sure token below 0, where it cannot be.
            entropy=(log_total - self.weighted / self.total).clamp(min=0.0),
            collision=self.squares / self.total.square(),
        )
