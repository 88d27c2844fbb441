"""An interleaved pipeline schedule: which microbatch each stage computes in each slot.

Source: Narayanan et al. 2021, arXiv:2104.04473, §2.2. Chunk c of the layers belongs to stage c
modulo stages, so each microbatch goes around the stages once per round. Microbatches form groups of
as many as there are stages. Rounds follow each other within a group, so a microbatch that leaves
the last stage begins its next round in the next slot.

Shapes: T slots, P stages.
"""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from lmlib.compute import Compute
from lmlib.parallel.layout import COMPUTE, num_shards
from lmlib.parallel.mesh_axes import STAGE


class Work(NamedTuple):
    """The work of each stage in each slot: NumPy arrays (T, P), or JAX arrays for one of them."""

    microbatch: Any  # its index
    round: Any  # the index of the stage's chunk
    counts: Any  # True if the stage has work; the other slots are the bubble
    begins: Any  # True if the microbatch comes from the waiting ones
    ends: Any  # True if it goes back to them


class Schedule(NamedTuple):
    """The numbers of stages (and of microbatches in a group), of groups, and of rounds."""

    stages: int
    groups: int
    rounds: int

    @property
    def microbatches(self) -> int:
        return self.stages * self.groups

    @property
    def slots(self) -> int:
        """Slots from the first stage's first microbatch to the last stage's last one."""
        return self.microbatches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """Fraction of slots in which a stage has nothing to do."""
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
        """(T): the group from which the first stage takes a microbatch; -1 for none."""
        work = self.work()
        return np.where(work.begins[:, 0], work.microbatch[:, 0] // self.stages, -1)

    def ends(self) -> np.ndarray:
        """(T): the group to which the last stage returns a microbatch; -1 for none."""
        work = self.work()
        return np.where(work.ends[:, -1], work.microbatch[:, -1] // self.stages, -1)


def schedule_of(rows: int, compute: Compute, mesh: Mesh | AbstractMesh) -> Schedule:
    """Returns the schedule for `rows` rows of an optimizer microbatch on `mesh`."""
    of_all_devices = compute.pipeline_rows * num_shards(COMPUTE["batch"], mesh)
    return Schedule(mesh.shape[STAGE], rows // of_all_devices, compute.pipeline_rounds)
