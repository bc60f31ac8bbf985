"""Dots, pivot, tail, and what is made of them in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from deltad.probes.sharded.vocab import VocabShard

from .fused import fused_dots, fused_sums
from .logits import GivenLogits, Logits
from .pool import single_threaded
from .reference import reference_readout
from .result import Readout, ReadoutError
from .rounding import Rounding
from .tail import first_of_each, tail_sums

_MANY: Final = 512
"""Beyond so many ids a token they are read from tiles, as their rows of W would fill the memory."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One readout: what is read, where and how."""

    head: Logits
    ids: Tensor
    shard: VocabShard | None
    token_chunk: int
    vocab_chunk: int
    workers: int
    exclusive: bool | None
    fused: bool
    collision: bool = dataclasses.field(kw_only=True)
    entropy: bool = dataclasses.field(kw_only=True)

    def run(self, source: Logits | GivenLogits, rounding: Rounding, token_chunk: int) -> Readout:
        """Dots, pivot, tail, and the last operations in float64."""
        if self.ids.shape[1] > _MANY:
            return self._wanted(self._plainly(slice(None)))
        vocab = self.head.vocab
        local = self.ids if self.shard is None else self.ids - self.shard.first
        here = (self.ids >= 0) & (local >= 0) & (local < vocab)
        local = torch.where(here, local, -1)
        if self.fused:
            token_chunk = max(1, len(local))
        parts = [
            slice(start, min(start + token_chunk, len(local)))
            for start in range(0, len(local), token_chunk)
        ]
        with single_threaded(self.workers) as each:
            z, spread = _joined(each(lambda part: self._dots(part, local[part]), parts), local)
            if self.shard is not None:
                z, spread = self.shard.highest(z, spread, self.ids)
            usable = torch.where(z.isfinite(), z, -torch.inf)
            highest = usable.amax(1) if z.shape[1] else usable.new_full((len(z),), -torch.inf)
            pivot = torch.where(highest.isfinite(), highest, 0.0).to(source.dtype).double()
            sums = each(lambda part: self._tail(source, part, local[part], pivot[part]), parts)
        tail = torch.cat(sums, 1) if sums else pivot.new_zeros(3, 0)
        if self.shard is not None:
            tail = self.shard.add(tail)
        return self._result(z, spread, pivot, tail, rounding, known=highest.isfinite())

    def _dots(self, part: slice, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at the ids that are here, and their spread."""
        if self.fused:
            return fused_dots(self.head, part, ids)
        return self.head.at_ids(part, ids)

    def _tail(
        self, source: Logits | GivenLogits, part: slice, ids: Tensor, pivot: Tensor
    ) -> Tensor:
        """Sums over all other ids that are here."""
        if self.fused:
            return fused_sums(
                self.head, part, ids, pivot, collision=self.collision, entropy=self.entropy
            )
        return tail_sums(
            source,
            part,
            ids,
            pivot,
            self.vocab_chunk,
            collision=self.collision,
            entropy=self.entropy,
        )

    def _result(
        self,
        z: Tensor,
        spread: Tensor,
        pivot: Tensor,
        tail: Tensor,
        rounding: Rounding,
        *,
        known: Tensor,
    ) -> Readout:
        """Normalize in float64, and read anew what the pivot was wrong for."""
        above = torch.where(first_of_each(self.ids), z - pivot[:, None], -torch.inf)
        weights = above.exp()
        listed = weights.sum(1)
        total = tail[0] + listed
        squares = tail[1] + weights.square().sum(1)
        weighted = tail[2] + torch.where(weights > 0, above * weights, 0.0).sum(1)
        log_total = total.log()
        logsumexp = pivot + log_total
        found = Readout(
            logsumexp=logsumexp,
            logprobs=z - logsumexp[:, None],
            # Rounding can carry the entropy of a sure token below 0, where it cannot be.
            entropy=(log_total - weighted / total).clamp(min=0.0) if self.entropy else None,
            collision=squares / total.square() if self.collision else None,
            error=rounding.error(z, spread, pivot, tail[0], tail[1] if self.collision else None),
        )
        wrong = ~known | ~tail.isfinite().all(0)
        if not bool(wrong.any()):
            return found
        rows = wrong.nonzero()[:, 0]
        again = dataclasses.replace(
            self._wanted(self._plainly(rows)), error=rounding.error_of_plain(z[rows], spread[rows])
        )
        return _put(found, rows, again)

    def _plainly(self, rows: Tensor | slice) -> Readout:
        """Read some tokens, or all, by the reference."""
        head, transform = self.head, self.head.transform
        return reference_readout(
            head.hidden[rows],
            head.weight,
            self.ids[rows],
            bias=head.bias,
            scale=transform.scale,
            softcap=transform.softcap,
            temperature=transform.temperature,
            token_chunk=self.token_chunk,
            vocab_chunk=self.vocab_chunk,
            low_rank=[(low[rows], high) for low, high in head.low_rank],
            shard=self.shard,
            exclusive=self.exclusive,
        )

    def _wanted(self, read: Readout) -> Readout:
        """Leave out of a readout what was not asked for."""
        return dataclasses.replace(
            read,
            entropy=read.entropy if self.entropy else None,
            collision=read.collision if self.collision else None,
        )


def _joined(found: Sequence[tuple[Tensor, Tensor]], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Dots and spreads of all parts."""
    if not found:
        none = torch.zeros(0, dtype=torch.float64, device=ids.device)
        return none.new_zeros(ids.shape), none
    return torch.cat([z for z, _ in found]), torch.cat([spread for _, spread in found])


def _put(read: Readout, rows: Tensor, other: Readout) -> Readout:
    """Replace some tokens of a readout."""

    def mixed(values: Tensor, fresh: Tensor) -> Tensor:
        return values.index_copy(0, rows, fresh)

    def either(values: Tensor | None, fresh: Tensor | None) -> Tensor | None:
        return None if values is None or fresh is None else mixed(values, fresh)

    error = read.error
    if error is not None and other.error is not None:
        error = ReadoutError(
            mixed(error.logit, other.error.logit), mixed(error.tail, other.error.tail)
        )
    return dataclasses.replace(
        read,
        logsumexp=mixed(read.logsumexp, other.logsumexp),
        logprobs=mixed(read.logprobs, other.logprobs),
        entropy=either(read.entropy, other.entropy),
        collision=either(read.collision, other.collision),
        error=error,
    )
