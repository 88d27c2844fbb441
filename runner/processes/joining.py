"""Runs of many processes: how they find each other, and how one of them leaves.

`docs/multihost.md` is the user's side of it.
"""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from runner.command_line.command import exit_code, tell
from runner.command_line.errors import AGREED, ConfigError
from runner.jax_settings.accelerators import has_tpu
from runner.processes.jax_messages import detects_nothing
from runner.processes.roll_call import roll_call
from runner.processes.supervisor import Connection

SHUTDOWN_SECONDS = 60  # that a process which is done waits for the others to be
# Where JAX's own detection may find something. Only it knows: these are asked for before it runs.
_LAUNCHERS = (
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "KUBERNETES_SERVICE_HOST",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_ADDRESSES_PATH",
)
_SIZES = ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")  # the inner launcher first


@dataclass(frozen=True)
class Processes:
    """Where this process finds the others of its run.

    Args:
      coordinator: host:port of process 0, where it will listen; `None`, with the next two, for
        what JAX detects.
      num_processes: how many processes the run has.
      process_id: this one's number, from 0.
      distributed: "auto": as many processes as JAX detects, one if it detects none; "on": it is a
        mistake if it detects none; "off": one.
      startup_seconds: limit of the wait for all processes to be there.
      heartbeat_seconds: a process that is silent for so long is taken for dead.
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
        if not re.fullmatch(r".+:\d+", self.coordinator):
            raise ConfigError(f"--coordinator={self.coordinator}: write host:port of process 0")
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"--process_id={self.process_id}: with --num_processes={self.num_processes} they "
                f"are 0 to {self.num_processes - 1}"
            )

    def may_be_several(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Whether `join` may find others; decided without JAX, which may be asked only once."""
        if self.coordinator is not None or self.distributed == "on":
            return True
        if self.distributed == "off" or _tasks(environment) == 1:
            return False
        # libtpu alone says nothing: it also compiles for TPUs that are elsewhere.
        on_tpu = importlib.util.find_spec("libtpu") is not None and has_tpu()
        return on_tpu or any(name in environment for name in _LAUNCHERS)

    def join(self, supervisor: Connection) -> None:
        """Connects to the other processes, before any other use of JAX.

        JAX aborts the process if those that it detects are not there in time. Raises ConfigError
        if it cannot detect them, or if the `roll_call` finds them wrong or absent.
        """
        limits: dict[str, Any] = {
            "initialization_timeout": self.startup_seconds,
            "heartbeat_timeout_seconds": self.heartbeat_seconds,
            "shutdown_timeout_seconds": SHUTDOWN_SECONDS,
        }
        jax.config.update("jax_enable_preemption_service", True)  # see `reached_stop`
        if self.coordinator is None:
            self._join_detected(limits)
        else:
            assert self.num_processes is not None and self.process_id is not None
            supervisor.tell(self.process_id, self.num_processes, joined=False)
            mistake = roll_call(
                self.coordinator, self.process_id, self.num_processes, self.startup_seconds
            )
            supervisor.tell(self.process_id, self.num_processes, joined=True)
            if mistake:
                raise ConfigError(mistake)
            try:
                jax.distributed.initialize(
                    self.coordinator,
                    self.num_processes,
                    self.process_id,
                    cluster_detection_method="deactivate",
                    **limits,
                )
            except jax.errors.JaxRuntimeError as error:
                raise ConfigError(
                    f"--coordinator={self.coordinator}: {error}; is its port in use?"
                ) from error
        supervisor.tell(jax.process_index(), jax.process_count(), joined=True)

    def _join_detected(self, limits: dict[str, Any]) -> None:
        try:
            jax.distributed.initialize(**limits)
        except (ValueError, RuntimeError) as error:
            if not detects_nothing(error):
                raise ConfigError(
                    f"JAX's detection of the other processes failed: {error}. For a run of one "
                    "process give --distributed=off; else --coordinator, --num_processes and "
                    "--process_id"
                ) from error
            tasks = _tasks(os.environ)
            if self.distributed == "on" or tasks > 1:
                raise ConfigError(
                    "JAX detects no other processes here"
                    + (f", but the launcher started {tasks}" if tasks > 1 else "")
                    + ": give --coordinator, --num_processes and --process_id (JAX needs the "
                    "package kubernetes on Kubernetes, and mpi4py for Open MPI 5); for a run of "
                    "one process give --distributed=off"
                ) from error


def _tasks(environment: Mapping[str, str]) -> int:
    """How many processes SLURM or Open MPI says it started; 0 if there is neither."""
    return next((int(environment[name]) for name in _SIZES if name in environment), 0)


def is_one_of_several() -> bool:
    """Whether `join` connected this process to a run; there may be no others in it."""
    return jax.distributed.is_initialized()


def reached_stop(step: int) -> bool:
    """Whether to stop after `step`, because SIGTERM has reached any of the processes.

    JAX's preemption service takes that signal, and agrees on a step that none of them has passed.
    Every process must call it after each step.
    """
    return multihost_utils.reached_preemption_sync_point(step)


def leave(error: BaseException, heartbeat_seconds: int, debug: bool) -> NoReturn:
    """Tells of `error` and ends this process of several, with the status of that error.

    All processes end together for what is `AGREED`; JAX aborts this one if the others do not within
    `SHUTDOWN_SECONDS`. For another error an ordinary exit would wait for the others, while they
    wait for this process. If it came from JAX, another process may be its cause: JAX's coordination
    service then soon aborts this process and names that one, so the error itself is told only if it
    does not.
    """
    together = isinstance(error, AGREED)
    if not together and jax.distributed.is_initialized() and _from_jax(error):
        seconds = 1.5 * heartbeat_seconds + 5
        first_line = str(error).partition("\n")[0]
        print(f"{first_line}; for {seconds:g} s another process may turn out to be the cause")
        sys.stdout.flush()
        time.sleep(seconds)
    tell(error, debug)
    if together:
        jax.distributed.shutdown()
    os._exit(exit_code(error))


def _from_jax(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False
