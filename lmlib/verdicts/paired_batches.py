"""Runs of the same seeds, paired batch by batch."""

import math
from collections.abc import Sequence

import numpy as np

from lmlib.verdicts.finished import FinishedRun, is_bits_per_byte, name_of_sums, sets_of
from lmlib.verdicts.text import BatchDifferences


def batch_differences(
    pairs: Sequence[tuple[FinishedRun, FinishedRun]], metric: str
) -> list[BatchDifferences]:
    """What each set that `metric` is over adds to it, of runs measured on the same batches.

    Args:
      pairs: a run and the baseline's of the same seed; at least one.
    """
    first = pairs[0][0].validation
    assert first is not None
    sets, name = sets_of(first, metric), name_of_sums(first, metric)
    units = dict.fromkeys(sets, 1.0)
    if is_bits_per_byte(metric):
        units = {
            each: 1 / math.log(2) / (of.bytes_per_target or math.nan) for each, of in sets.items()
        }
    weights = {  # the counts of units, or of bytes, unless the run has weights
        each: float(of.counts.sum()) / units[each] if of.weight is None else of.weight
        for each, of in sets.items()
    }

    def sums(run: FinishedRun, of_set: str) -> np.ndarray:
        assert run.validation is not None
        return run.validation.sets[of_set].sums[name]

    return [
        BatchDifferences(
            sums_SN=np.stack([sums(one, each) - sums(other, each) for one, other in pairs]),
            counts_N=of.counts,
            factor=units[each] * weights[each] / sum(weights.values()),
        )
        for each, of in sets.items()
    ]
