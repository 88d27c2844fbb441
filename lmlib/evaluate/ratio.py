"""A ratio of sums over documents, such as nats per token, with its standard error.

Documents are independent of each other; tokens of one document are not. The ratio of n documents
with numerators y and denominators x is R = Σy / Σx, and its standard error is

    sqrt(n / (n - 1) · Σ (y - R x)²) / Σx

(Cochran, Sampling Techniques, 3rd edition 1977, §6.4, for an infinite population; for means over
tokens this is the clustered standard error of Miller 2024, arXiv:2411.00640, §2.2).
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and its standard error, in the same unit; `None` for fewer than two documents."""

    value: float
    standard_error: float | None


class Ratio:
    """Sums over documents, in float64; documents with a denominator of 0 are ignored."""

    def __init__(self) -> None:
        self.documents = 0
        self.numerator = self.denominator = 0.0
        self._yy = self._xy = self._xx = 0.0

    def add(self, y: float, x: float) -> None:
        """Adds a document's numerator and denominator."""
        if x == 0:
            return
        self.documents += 1
        self.numerator += y
        self.denominator += x
        self._yy += y * y
        self._xy += x * y
        self._xx += x * x

    def estimate(self, unit: float = 1.0) -> Estimate:
        """Returns the ratio divided by `unit`, and its standard error.

        Raises:
          ValueError: if no document has a denominator.
        """
        if self.documents == 0:
            raise ValueError("the ratio is undefined: no document has a denominator")
        ratio = self.numerator / self.denominator
        if self.documents == 1:
            return Estimate(ratio / unit, None)
        squares = self._yy - 2 * ratio * self._xy + ratio**2 * self._xx
        n = self.documents
        # Rounding may give a negative number; non-finite numbers are kept.
        squares = 0.0 if squares < 0 else squares
        error = math.sqrt(squares * n / (n - 1)) / self.denominator
        return Estimate(ratio / unit, error / unit)
