"""Dependence of a difference between runs on the validation text.

Batches show how far other text would change a difference (Clark 1973, The language-as-fixed-effect
fallacy). Pairing runs batch by batch removes the difficulty of each batch (Miller 2024,
arXiv:2411.00640, §3.2). A mean over tokens is a ratio of sums over batches, with the standard error
of Cochran, Sampling Techniques, 3rd edition 1977, §6.4, as in `lmlib.evaluate.ratio`.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Num
from scipy import special

INTERVAL = 0.9


@dataclasses.dataclass(frozen=True)
class TextPrecision:
    """Precision of a difference with respect to the validation text, in the metric's unit.

    `of_one_seed` is the standard error over batches of one seed's difference, averaged over seeds;
    `of_the_mean` that of the mean over seeds. `share` is a 90 % interval of the fraction of the
    variance between seeds that comes from the text; `None` for fewer than two seeds.
    """

    of_one_seed: float
    of_the_mean: float
    share: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class BatchDifferences:
    """The differences of S seeds on one set, as sums over the units of each of N batches.

    `factor` converts a mean over the set's `counts_N` units to its part in the metric: the set's
    weight in a total, times a change of unit.
    """

    sums_SN: Float[np.ndarray, "S N"]
    counts_N: Num[np.ndarray, "N"]
    factor: float = 1.0


def text_precision(sets: Sequence[BatchDifferences]) -> TextPrecision | None:
    """Returns the precision of a metric that is a sum over `sets`.

    `None` if a set has fewer than two batches.
    """
    if not sets or any(len(each.counts_N) < 2 for each in sets):
        return None
    seeds = len(sets[0].sums_SN)
    one = mean = apart = 0.0
    freedom, means_S = 0, np.zeros(seeds)
    for each in sets:
        batches, total = len(each.counts_N), each.counts_N.sum()
        ratio_S = each.sums_SN.sum(1) / total
        errors_SN = each.sums_SN - ratio_S[:, None] * each.counts_N
        in_common_N = errors_SN.mean(0)
        unit = (each.factor / total) ** 2 * batches / (batches - 1)
        one += unit * float(np.sum(errors_SN**2)) / seeds
        mean += unit * float(np.sum(in_common_N**2))
        apart += unit * float(np.sum((errors_SN - in_common_N) ** 2)) / max(seeds - 1, 1)
        means_S += each.factor * ratio_S
        freedom += (seeds - 1) * (batches - 1)
    share = None
    if seeds > 1 and (between := float(np.var(means_S, ddof=1))) > 0:
        # Both variance estimates are independent, so their quotient over its true value has the F
        # distribution (two-way analysis of variance, of seeds and batches: Scheffé 1959, §4.2).
        ends = special.fdtri(freedom, seeds - 1, [(1 + INTERVAL) / 2, (1 - INTERVAL) / 2])
        low, high = np.minimum(apart / between / ends, 1.0).tolist()
        share = low, high
    return TextPrecision(math.sqrt(one), math.sqrt(mean), share)
