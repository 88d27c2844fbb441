"""Stages of a run: other batch sizes or other rows from some step on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from lmlib.data.batch import Source
from lmlib.data.mixture import Mixture
from lmlib.data.stages import Stages

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DataStage:
    """A stage of a run with its own batches.

    Args:
      begin: the number of steps before this stage. An int is absolute, and stays when the run is
        extended or forked; a float is a fraction of the run's steps.
      data: its batches, which continue where the text of the earlier stages ends; see
        `lmlib.data.stages.Stages`.
      microbatches: as in `Experiment`; `None` takes the experiment's.
    """

    begin: int | float
    data: Source
    microbatches: int | None = None

    def first_step(self, steps: int) -> int:
        """Returns its first step, counted from 0; raises ValueError if it has none."""
        begin = self.begin if isinstance(self.begin, int) else round(self.begin * steps)
        if not 0 < begin < steps:
            raise ValueError(
                "a later stage's begin is a fraction of the steps, between 0.0 and 1.0, or a whole "
                f"number of them, here from 1 to {steps - 1:,}; got {self.begin}"
            )
        return begin


def batches_of(data: Source, later: Sequence[DataStage], steps: int) -> Source:
    """Returns the batches of all stages; raises ValueError if they do not fit each other."""
    if not later:
        return data
    sizes = {(each.batch_size, each.sequence_length) for each in (data, *(s.data for s in later))}
    if len(sizes) > 1 and any(isinstance(s.data, Mixture) and s.data.begins[1:] for s in later):
        raise ValueError(
            "a Mixture in later_stages changes its weights at a step of its own batches, which is "
            "another step of a run whose stages differ in batch_size or sequence_length: give each "
            "stage a Mixture with one set of weights, or keep the sizes"
        )
    return Stages([(0, data), *((stage.first_step(steps), stage.data) for stage in later)])


def spans_of(batches: Source, steps: int) -> dict[range, Source]:
    """Returns the batches of each stage by its steps, counted from 0, in a run of `steps`."""
    return batches.spans(steps) if isinstance(batches, Stages) else {range(steps): batches}


def at(table: Mapping[range, T], step: int) -> T:
    """Returns the value of `table` whose range of steps, counted from 0, contains `step`."""
    return next(value for steps, value in table.items() if step in steps)
