"""Connects the processes of a run, and ends a process so that the others notice.

`docs/multihost.md` describes this for users.
"""

import contextlib
import os
import resource
import sys
import time
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from runner.command_line.command import exit_code, tell
from runner.errors import AGREED, ConfigError
from runner.processes.endings import detects_nothing
from runner.processes.launch import Processes, tasks
from runner.processes.parent import Supervisor

SHUTDOWN_SECONDS = 60  # a finished process waits this long for the others
_PROXY = "grpc_proxy"  # gRPC reads the lower-case name
_OPEN_FILES = 1 << 16  # process 0 has a connection to each process, and the usual limit is 1,024


def join(processes: Processes, supervisor: Supervisor) -> None:
    """Connects to the other processes; call it before any other use of JAX.

    JAX aborts this process if other processes are late.

    Raises:
      ConfigError: if JAX cannot detect the processes or start the coordinator.
    """
    jax.config.update("jax_enable_preemption_service", True)  # see `reached_stop`
    if not os.environ.get(_PROXY):
        # Empty means no proxy between the processes; data and buckets still use http_proxy.
        os.environ[_PROXY] = ""
        jax.config.update("jax_check_proxy_envs", False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _OPEN_FILES), most))
    given: dict[str, Any] = {}
    if processes.coordinator is not None:
        assert processes.num_processes is not None and processes.process_id is not None
        supervisor.tell(processes.process_id, processes.num_processes, connected=False)
        given = {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.num_processes,
            "process_id": processes.process_id,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=processes.startup_seconds,
            heartbeat_timeout_seconds=processes.heartbeat_seconds,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        if mistake := _mistake(error, processes):
            raise ConfigError(mistake) from error
    supervisor.tell(jax.process_index(), jax.process_count(), connected=True)


def _mistake(error: Exception, processes: Processes) -> str:
    """Returns the message for an error of JAX; empty for a run of one process."""
    if processes.coordinator is not None:
        return f"--coordinator={processes.coordinator}: {error}; is its port in use?"
    if not detects_nothing(error):
        return (
            f"JAX failed to detect the other processes: {error}. For a run of one process give "
            "--distributed=off, otherwise --coordinator, --num_processes and --process_id"
        )
    started = tasks(os.environ)
    if processes.distributed != "on" and started <= 1:
        return ""
    return (
        "JAX detects no other processes here"
        + (f", but the launcher started {started}" if started > 1 else "")
        + ": give --coordinator, --num_processes and --process_id (JAX needs the package "
        "kubernetes on Kubernetes, and mpi4py for Open MPI 5); for a run of one process give "
        "--distributed=off"
    )


def is_one_of_several() -> bool:
    """True if `join` connected this process to a run, even if it is the only process."""
    return jax.distributed.is_initialized()


def reached_stop(step: int) -> bool:
    """True if the run must stop after `step` because a process received SIGTERM.

    JAX's preemption service handles the signal, and agrees on a step that no process has passed.
    Every process must call this after each step.
    """
    return multihost_utils.reached_preemption_sync_point(step)


def leave(error: BaseException, heartbeat_seconds: int, debug: bool) -> NoReturn:
    """Shows `error` and ends this process, in a run of several, with the error's exit status.

    For errors of the types `AGREED`, all processes end together; JAX aborts this process if the
    others don't end within `SHUTDOWN_SECONDS`. For other errors this process exits at once, since a
    normal exit would wait for the others, which wait for this process.

    An error from JAX may be caused by another process. JAX's coordination service then soon aborts
    this process and names the other one. So this function first waits for that.
    """
    together = isinstance(error, AGREED)
    if not together and jax.distributed.is_initialized() and _from_jax(error):
        seconds = 1.5 * heartbeat_seconds + 5
        first_line = str(error).partition("\n")[0]
        print(f"{first_line}; waiting {seconds:g} s to see if another process caused it")
        sys.stdout.flush()
        time.sleep(seconds)
    tell(error, debug)
    if together:
        jax.distributed.shutdown()
    os._exit(exit_code(error))


def _from_jax(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None
