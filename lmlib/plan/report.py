"""What `plan` finds out about a run."""

import dataclasses
import json
from typing import Any

from lmlib.plan.collectives import Collectives
from lmlib.plan.communication_warnings import CommunicationWarning
from lmlib.plan.flops_per_token import FlopsPerToken
from lmlib.plan.memory import Memory
from lmlib.plan.roofline import Estimate


@dataclasses.dataclass(frozen=True)
class Report:
    """A plan of one train step on one target; `str()` gives all of it.

    Args:
      target: as `--topology` takes it.
      mesh: sizes of the mesh's axes.
      parameters: of the whole model.
      batch_size, sequence_length, microbatches: of the step.
      remarks: on the plan as a whole.
      memory: of each device.
      collectives: of each device; `None` if the step does not fit, and was not compiled.
      warnings: what the communication should not be like.
      flops: of the whole step.
      estimate: of the time; `None` where that is unknown.
      seconds: what tracing and compiling took here.
      versions: of what compiled it.
    """

    target: str
    mesh: dict[str, int]
    parameters: int
    batch_size: int
    sequence_length: int
    microbatches: int
    remarks: tuple[str, ...]
    memory: Memory
    collectives: Collectives | None
    warnings: tuple[CommunicationWarning, ...]
    flops: FlopsPerToken
    estimate: Estimate | None
    seconds: float
    versions: dict[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        return "\n\n".join(
            [
                self._heading(),
                section("Memory", str(self.memory)),
                section("Communication", self._communication()),
                section("FLOPs", str(self.flops)),
                section("Time", self._time()),
                f"compiled in {self.seconds:,.0f} s by {versions}",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold; bytes, FLOPs and seconds."""
        fields = dataclasses.asdict(self)
        fields["memory"]["fits"] = self.memory.fits
        return json.loads(json.dumps(fields, default=str))  # dtypes by their names

    def _heading(self) -> str:
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        plural = "es" * (self.microbatches > 1)
        return "\n".join(
            [
                f"{self.parameters:,} parameters on {self.target}, mesh {mesh}",
                f"{self.batch_size * self.sequence_length:,} tokens a step: {self.batch_size:,} "
                f"sequences of {self.sequence_length:,}, in {self.microbatches} microbatch{plural}",
                *self.remarks,
            ]
        )

    def _communication(self) -> str:
        if self.collectives is None:
            return "unknown: the step does not fit"
        return "\n\n".join([str(self.collectives), *map(str, self.warnings)])

    def _time(self) -> str:
        if self.collectives is None:
            return "unknown: the step does not fit"
        return str(self.estimate or f"unknown: nothing is known of the speed of {self.target}")


def section(title: str, text: str) -> str:
    return f"{title}\n{'─' * len(title)}\n{text}"
