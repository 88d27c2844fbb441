"""Which stage computes which microbatch when: an interleaved schedule (Narayanan et al. 2021,
arXiv:2104.04473, §2.2).

Layers are cut into stages × rounds chunks, chunk c for the stage c modulo stages, so that each
microbatch goes around the stages once a round. In a slot of time every stage computes a chunk for
one microbatch. As many microbatches as there are stages make a group: one group follows another,
and within a group rounds follow each other, so a microbatch that leaves the last stage begins its
next round in the next slot.

Shapes: T slots, P stages.
"""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from lmlib.compute import Compute
from lmlib.parallel.layout import COMPUTE, pieces
from lmlib.parallel.mesh_axes import STAGE


class Work(NamedTuple):
    """What each stage does in each slot, as NumPy arrays (T, P), or JAX's of one of them.

    Attributes:
      microbatch: which one; of any kind where it does not count.
      round: which of the stage's chunks.
      counts: whether there is something to do; the other slots are the bubble.
      begins: whether the microbatch comes from where it waits.
      ends: whether it goes back there.
    """

    microbatch: Any
    round: Any
    counts: Any
    begins: Any
    ends: Any


class Schedule(NamedTuple):
    """`stages`; `groups` of as many microbatches; `rounds` of each microbatch."""

    stages: int
    groups: int
    rounds: int

    @property
    def microbatches(self) -> int:
        return self.stages * self.groups

    @property
    def slots(self) -> int:
        """From the first stage's first microbatch to the last one's last."""
        return self.microbatches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of slots in which a stage has nothing to do."""
        return (self.stages - 1) / self.slots

    def work(self) -> Work:
        slot_T, stage_P = np.arange(self.slots), np.arange(self.stages)
        done_TP = slot_T[:, None] - stage_P
        counts_TP = (done_TP >= 0) & (done_TP < self.microbatches * self.rounds)
        done_TP = np.where(counts_TP, done_TP, 0)
        visit_TP, within_TP = np.divmod(done_TP, self.stages)
        group_TP, round_TP = np.divmod(visit_TP, self.rounds)
        return Work(
            microbatch=group_TP * self.stages + within_TP,
            round=round_TP,
            counts=counts_TP,
            begins=counts_TP & (round_TP == 0) & (stage_P == 0),
            ends=counts_TP & (round_TP == self.rounds - 1) & (stage_P == self.stages - 1),
        )

    def begins(self) -> np.ndarray:
        """(T): the group from which the first stage takes a microbatch; -1 if it takes none."""
        work = self.work()
        return np.where(work.begins[:, 0], work.microbatch[:, 0] // self.stages, -1)

    def ends(self) -> np.ndarray:
        """(T): the group to which the last stage gives one back; -1 if it gives none."""
        work = self.work()
        return np.where(work.ends[:, -1], work.microbatch[:, -1] // self.stages, -1)


def schedule_of(rows: int, compute: Compute, mesh: Mesh | AbstractMesh) -> Schedule:
    """Of so many rows, those of a microbatch of the optimizer's, on `mesh`."""
    of_all_devices = compute.pipeline_rows * pieces(COMPUTE["batch"], mesh)
    return Schedule(mesh.shape[STAGE], rows // of_all_devices, compute.pipeline_rounds)
