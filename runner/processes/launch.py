"""The other processes of a run by the flags and the launcher, without a use of JAX."""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmlib.hardware.detection import has_tpu
from runner.errors import ConfigError

# Variables of launchers that JAX may detect. They are looked up before its detection runs.
_LAUNCHERS = (
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "KUBERNETES_SERVICE_HOST",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_ADDRESSES_PATH",
)
# The inner launcher first. An interactive shell of SLURM's is a step of one task, in which
# SLURM_NTASKS keeps the number of the job.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


@dataclass(frozen=True)
class Processes:
    """The place where this process finds the others of its run.

    Args:
      coordinator: host:port of process 0, where it will listen; `None`, with the next two, to let
        JAX detect them.
      num_processes: how many processes the run has.
      process_id: this one's number, from 0.
      distributed: "auto": as many processes as JAX detects, one if it detects none; "on": it is a
        mistake if it detects none; "off": one.
      startup_seconds: limit of the wait for all processes to be there.
      heartbeat_seconds: a process that is silent for longer is taken for dead.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    distributed: str = "auto"
    startup_seconds: int = 300
    heartbeat_seconds: int = 30

    def check(self) -> None:
        """Raises ConfigError for settings that do not go together."""
        given = (self.coordinator, self.num_processes, self.process_id)
        if given == (None, None, None):
            return
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            raise ConfigError("give --coordinator, --num_processes and --process_id all together")
        if self.distributed == "off":
            raise ConfigError(f"--distributed=off with --coordinator={self.coordinator}: omit one")
        host, _, port = self.coordinator.rpartition(":")
        if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 1 << 16):
            raise ConfigError(
                f"--coordinator={self.coordinator}: write host:port of process 0, the port from 1 "
                "to 65535"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"--process_id={self.process_id}: with --num_processes={self.num_processes} they "
                f"are 0 to {self.num_processes - 1}"
            )

    def may_be_several(self, environment: Mapping[str, str] = os.environ) -> bool:
        """If `join` may find others; decided without JAX, which may be asked only once."""
        if self.coordinator is not None or self.distributed == "on":
            return True
        if self.distributed == "off" or tasks(environment) == 1:
            return False
        # libtpu is not enough: it also compiles for TPUs that are elsewhere.
        on_tpu = importlib.util.find_spec("libtpu") is not None and has_tpu()
        return on_tpu or any(name in environment for name in _LAUNCHERS)


def tasks(environment: Mapping[str, str]) -> int:
    """The number of processes that SLURM or Open MPI says it started; 0 if there is neither."""
    return next((int(environment[name]) for name in _SIZES if name in environment), 0)
