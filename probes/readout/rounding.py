"""How far float32 arithmetic and given logits in bfloat16 carry a readout from the true one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .logits import Logits
from .result import ReadoutError

# Additions that a term of a dot goes through when a row is summed: two chains of at most 16 in
# each of 32 lanes, where it takes part in half of them on average, and the five that join the
# lanes.
_DEPTH_OF_SUM: Final = 2 * 8 + 5

# Rounding of exponentials and of their sums within a tile, in units of the dtype.
_UNITS_OF_SUM: Final = 4.0


@dataclass(frozen=True)
class Rounding:
    r"""Model of the rounding of a readout, from which its standard deviations follow.

    Attributes
    ----------
    unit : float
        Largest relative error of one operation in a tile, 2⁻²⁴ in float32.
    depth : int
        Length of a dot, the number of terms.
    factor : float
        Derivative of a logit at the temperature by W h, at most.
    stored : float
        Largest relative error of what somebody else rounded the logits to, 2⁻⁸ for bfloat16; 0
        where that is float32.

    Notes
    -----
    **A dot** :math:`\sum_{h=1}^n t_h`. Each addition rounds its partial sum p by an error that is
    as good as uniform on ±u|p|, of variance u²p²/3. With terms of no common sign, the partial sums
    that one level of a tree forms have together E Σp² = Σt²; with terms of one sign they have at
    most the square of the whole, and half of that at each level below. A term that goes through d
    levels therefore costs

    .. math:: \sigma^2 = \tfrac{u^2}{3}\,\big(d \textstyle\sum_h t_h^2 + 2 s^2\big)

    with s the dot itself. For a matrix product, which adds term after term, the partial sums of a
    chain take d = n/2, and n/3 instead of 2 for the common sign. The transform of the logits
    multiplies σ by at most s/T. √Σt² is known for the ids asked for, and its maximum over them
    stands for all.

    **The tail** :math:`\lambda = \log \sum_j e^{y_j}` with y = z − m. Errors of single logits are
    independent, so :math:`\sigma_\lambda^2 = \sum_j e^{2 y_j}\sigma_j^2 / (\sum_j e^{y_j})^2`. With
    S and C the sums of e^y and e^(2y), σ_j = σ gives σ² C/S². Where logits were rounded to
    bfloat16, :math:`\sigma_j^2 = v^2 z_j^2/3`, v = 2⁻⁸, and z² = m² + y² + 2 m y. Under the weights
    e^(2y)/C the mean of e^(−y) is S/C, and (1 + log x)² is concave for x ≥ 1, so by Jensen's
    inequality

    .. math:: \textstyle\sum_j e^{2y_j} y_j^2 \le C\,(1 + \log(S/C))^2

    as long as no y is positive; where one can be, y ≤ ½ log C, and 1 + ½ log C takes the place of
    1. The term 2 m y is positive only for m < 0 or y > 0. That exponentials of rounded numbers are
    too large on average, by v²y²/6, is the same before and after a step and left out.
    """

    unit: float
    depth: int
    factor: float
    stored: float

    @classmethod
    def of(cls, head: Logits, given: torch.dtype | None = None) -> Rounding:
        """Of logits that the readout multiplies itself, or of given ones in this dtype."""
        unit = torch.finfo(head.dtype).eps / 2
        stored = 0.0 if given is None else torch.finfo(given).eps / 2
        return cls(
            unit, head.hidden.shape[1], abs(head.transform.factor), stored if stored > unit else 0.0
        )

    def of_dot(self, z: Tensor, spread: Tensor) -> Tensor:
        """Standard deviation of a dot that was multiplied out, shape (token,)."""
        return self._of_sum(z, spread, _DEPTH_OF_SUM, 2.0)

    def of_tile(self, z: Tensor, spread: Tensor) -> Tensor:
        """Standard deviation of a logit of a matrix product, shape (token,)."""
        return self._of_sum(z, spread, self.depth / 2, max(2.0, self.depth / 3))

    def error(
        self, z: Tensor, spread: Tensor, pivot: Tensor, total: Tensor, squares: Tensor | None
    ) -> ReadoutError:
        """Standard deviations of a readout.

        Parameters
        ----------
        z : Tensor, shape (token, id)
            Logits asked for, at the temperature; NaN is left out.
        spread : Tensor, shape (token,)
            Largest √Σt² of their dots.
        pivot, total, squares : Tensor, shape (token,)
            m, S and C; without C the tail counts as a single id.
        """
        if squares is None:
            squares = total.square()
        share = (squares / total.square()).clamp(max=1.0)
        above = squares.log().clamp(min=0.0) / 2
        reach = 1 + above + (total / squares).log().clamp(min=0.0)
        beyond = pivot.clamp(max=0.0).abs() + above
        reach = (pivot.square() + reach.square() + 2 * pivot.abs() * beyond).sqrt()
        variance = self.of_tile(z, spread).square() + (self.stored * reach).square() / 3
        tail = (share * variance + (_UNITS_OF_SUM * self.unit) ** 2).sqrt()
        return ReadoutError(self.of_dot(z, spread), torch.where(total > 0, tail, 0.0))

    def error_of_plain(self, z: Tensor, spread: Tensor) -> ReadoutError:
        """Standard deviations of the reference's readout, whose logits all come from tiles."""
        logit = self.of_tile(z, spread)
        return ReadoutError(logit, (logit.square() + (_UNITS_OF_SUM * self.unit) ** 2).sqrt())

    def _of_sum(self, z: Tensor, spread: Tensor, levels: float, common: float) -> Tensor:
        """σ of a sum by the two shares of its variance."""
        largest = torch.where(z.isfinite(), z.abs(), 0.0).amax(1) if z.shape[1] else spread
        variance = levels * (self.factor * spread).square() + common * largest.square()
        return self.unit / math.sqrt(3) * variance.sqrt()
