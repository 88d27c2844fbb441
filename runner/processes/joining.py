"""Connects the processes of a run, and ends a process so that the others notice.

`docs/multihost.md` describes this for users.
"""

import os
import sys
import time
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from runner.command_line.command import exit_code, tell
from runner.errors import AGREED, ConfigError
from runner.processes.endings import detects_nothing
from runner.processes.launch import Processes, tasks
from runner.processes.roll_call import roll_call
from runner.processes.supervisor import Connection

SHUTDOWN_SECONDS = 60  # a finished process waits this long for the others

_PROXY = "grpc_proxy"  # gRPC reads the lower-case name


def join(processes: Processes, supervisor: Connection) -> None:
    """Connects to the other processes; call it before any other use of JAX.

    JAX aborts this process if other processes that it detected are late.

    Raises:
      ConfigError: if JAX cannot detect the processes, or `roll_call` finds that some are missing
        or have different settings.
    """
    limits: dict[str, Any] = {
        "initialization_timeout": processes.startup_seconds,
        "heartbeat_timeout_seconds": processes.heartbeat_seconds,
        "shutdown_timeout_seconds": SHUTDOWN_SECONDS,
    }
    jax.config.update("jax_enable_preemption_service", True)  # see `reached_stop`
    _connect_without_proxy()
    if processes.coordinator is None:
        _join_detected(processes, limits)
    else:
        assert processes.num_processes is not None and processes.process_id is not None
        numbers = processes.process_id, processes.num_processes
        supervisor.tell(*numbers, joined=False)
        mistake = roll_call(
            processes.coordinator,
            processes.process_id,
            processes.num_processes,
            processes.startup_seconds,
        )
        supervisor.tell(*numbers, joined=True)
        if mistake:
            raise ConfigError(mistake)
        try:
            jax.distributed.initialize(
                processes.coordinator,
                processes.num_processes,
                processes.process_id,
                cluster_detection_method="deactivate",
                **limits,
            )
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                f"--coordinator={processes.coordinator}: {error}; is its port in use?"
            ) from error
    supervisor.tell(jax.process_index(), jax.process_count(), joined=True, connected=True)


def _connect_without_proxy() -> None:
    """Lets JAX's processes connect directly instead of through the proxy in http_proxy.

    Data and buckets are still read through the proxy. If the user has set `grpc_proxy`, it is kept,
    and JAX warns about it.
    """
    if not os.environ.get(_PROXY):
        os.environ[_PROXY] = ""  # gRPC reads this variable first; empty means no proxy
        jax.config.update("jax_check_proxy_envs", False)


def _join_detected(processes: Processes, limits: dict[str, Any]) -> None:
    try:
        jax.distributed.initialize(**limits)
    except (ValueError, RuntimeError) as error:
        if not detects_nothing(error):
            raise ConfigError(
                f"JAX's detection of the other processes failed: {error}. For a run of one "
                "process give --distributed=off; else --coordinator, --num_processes and "
                "--process_id"
            ) from error
        started = tasks(os.environ)
        if processes.distributed == "on" or started > 1:
            raise ConfigError(
                "JAX detects no other processes here"
                + (f", but the launcher started {started}" if started > 1 else "")
                + ": give --coordinator, --num_processes and --process_id (JAX needs the "
                "package kubernetes on Kubernetes, and mpi4py for Open MPI 5); for a run of "
                "one process give --distributed=off"
            ) from error


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
    this process and names the other one. So this function first waits for that, and shows the error
    only if it doesn't happen.
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
