"""Finds the other processes of a run from flags and the launcher, without JAX."""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmlib.hardware.detection import has_tpu
from runner.errors import ConfigError

# Environment variables of launchers that JAX may detect.
_LAUNCHERS = (
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "KUBERNETES_SERVICE_HOST",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_ADDRESSES_PATH",
)
# Variables with the number of processes, innermost launcher first. A SLURM interactive shell is a
# step of one task, but SLURM_NTASKS in it still has the number of the whole job.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


@dataclass(frozen=True)
class Processes:
    """Settings with which this process finds the other processes of its run.

    Args:
      coordinator: host:port at which process 0 listens. If this and the next two are `None`, JAX
        detects them.
      num_processes: the number of processes in the run.
      process_id: the number of this process, from 0.
      distributed: "auto" to use the processes that JAX detects, or one if it detects none; "on" to
        make it an error if JAX detects none; "off" for one process.
      startup_seconds: how long to wait until all processes have started.
      heartbeat_seconds: a process that is silent for longer is considered dead.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    distributed: str = "auto"
    startup_seconds: int = 300
    heartbeat_seconds: int = 30

    def check(self) -> None:
        """Raises ConfigError if the settings are incompatible."""
        given = (self.coordinator, self.num_processes, self.process_id)
        if given == (None, None, None):
            return
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            raise ConfigError("give --coordinator, --num_processes and --process_id together")
        if self.distributed == "off":
            raise ConfigError(f"--distributed=off with --coordinator={self.coordinator}: omit one")
        host, _, port = self.coordinator.rpartition(":")
        if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 1 << 16):
            raise ConfigError(
                f"--coordinator={self.coordinator}: expected host:port of process 0, with a port "
                "from 1 to 65535"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"--process_id={self.process_id}: with --num_processes={self.num_processes}, "
                f"expected 0 to {self.num_processes - 1}"
            )

    def check_joined(self, count: int) -> None:
        """Raises ConfigError unless the run has as many processes as this process expects."""
        if self.num_processes not in (None, count):
            raise ConfigError(
                f"--num_processes={self.num_processes}, but {count} on process 0: give all "
                "processes the same number"
            )

    def may_be_several(self, environment: Mapping[str, str] = os.environ) -> bool:
        """True if `join` may find other processes.

        JAX isn't used, since its detection can run only once.
        """
        if self.coordinator is not None or self.distributed == "on":
            return True
        if self.distributed == "off" or tasks(environment) == 1:
            return False
        # libtpu may be installed without a TPU, to compile for other machines.
        on_tpu = importlib.util.find_spec("libtpu") is not None and has_tpu()
        return on_tpu or any(name in environment for name in _LAUNCHERS)


def tasks(environment: Mapping[str, str]) -> int:
    """Returns the number of processes started by SLURM or Open MPI; 0 without either."""
    return next((int(environment[name]) for name in _SIZES if name in environment), 0)
