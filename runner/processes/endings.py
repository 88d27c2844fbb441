"""Explains how a process of a run ended, and which other process caused it.

JAX reports the cause only in messages. tests/runner/processes/test_lost_processes.py makes JAX
write each one.
"""

import dataclasses
import re
import signal
from collections.abc import Sequence

from runner.command_line.exit_status import FINISHED, MISTAKE, PEER_ENDED, SIGNALLED, STOPPED

# JAX's coordination service writes these before it aborts a process, with one name per line.
_UNHEALTHY = re.compile(r"unhealthy \(stopped sending heartbeats\):\s*(.*?)\s*The tasks", re.DOTALL)
_BARRIER = re.compile(r"Some timed out task names:\s*(.*?)\s*(?:\[type|$)", re.DOTALL)
_SILENT = re.compile(r"DEADLINE_EXCEEDED[^\n]*\s+RPC: /\S*CoordinationService/Heartbeat")
_NUMBER = re.compile(r"(\d+)\s*(?:$|[\n,])")


@dataclasses.dataclass(frozen=True)
class Ending:
    """The exit code and message of a supervisor.

    Attributes:
      is_news: True unless the process has already shown the message.
    """

    exit_code: int
    message: str = ""
    is_news: bool = True


def ending(
    returncode: int,
    output: str,
    process: int | None,
    joined: bool,
    connected: bool,
    heartbeat_seconds: int,
    startup_seconds: int,
) -> Ending:
    """Returns the ending of a supervised process.

    Args:
      returncode: as in `subprocess`, negative for a signal.
      output: the end of the process's stderr.
      process: the process's number, `None` if it ended before it knew the number.
      joined: True if it found the other processes, or that there are none.
      connected: True if JAX connected it to the other processes.
      heartbeat_seconds, startup_seconds: the limits of the process, for messages.
    """
    if returncode in (FINISHED, STOPPED):
        return Ending(returncode)
    name = "this process" if process is None else f"process {process}"
    last_line = output.rstrip().rpartition("\n")[2]
    if returncode == MISTAKE:
        # After joining, all processes find the same mistake, and process 0 reports it.
        return Ending(MISTAKE, "" if joined else last_line, is_news=process not in (0, None))
    aborted = returncode == -signal.SIGABRT
    if aborted and not connected:
        return Ending(
            MISTAKE,
            f"error: {name} did not find the others within {startup_seconds} s: see that each of "
            "them runs, and that they may connect to each other without a proxy (grpc_proxy); or "
            "raise --startup_seconds. If it is the only one, in an interactive shell of SLURM's "
            "say, give --distributed=off",
        )
    if aborted and (reason := _missed(output, heartbeat_seconds)):
        return Ending(
            PEER_ENDED,
            f"error: {name} ends because {reason} may say why; the same command goes on from the "
            "newest checkpoint",
        )
    if returncode < 0:
        number = -returncode
        killed = signal.Signals(number).name
        hint = ", perhaps for want of memory" if number == signal.SIGKILL else ""
        return Ending(SIGNALLED + number, f"error: {name} was ended by {killed}{hint}")
    reason = last_line.removeprefix("error: ")
    return Ending(returncode, f"error: {name} failed: {reason}", process != 0)


def _missed(output: str, heartbeat_seconds: int) -> str:
    """Names the process that stopped responding, and its log; empty if unknown."""
    if ended := _numbers(_UNHEALTHY, output):
        return (
            f"{processes_text(ended)} ended or stopped answering (nothing heard for "
            f"{heartbeat_seconds} s); {_logs(ended)}"
        )
    if "Failed to send RPC to coordination service" in output or _SILENT.search(output):
        return (
            "process 0, the coordinator, ended, stopped answering or cannot be reached; "
            f"{_logs([0])}"
        )
    if late := _numbers(_BARRIER, output):
        return f"{processes_text(late)} did not come to a barrier in time; {_logs(late)}"
    if "the JAX distributed service detected fatal errors" in output:
        return "another process ended or stopped answering; the logs of the others"
    return ""


def detects_nothing(error: BaseException) -> bool:
    """True if `jax.distributed.initialize` raised `error` because no launcher was detected."""
    return "coordinator_address should be defined" in str(error)


def processes_text(processes: Sequence[int]) -> str:
    """Formats the numbers of at most ten processes."""
    numbers = ", ".join(map(str, processes[:10])) + ", …" * (len(processes) > 10)
    return f"process{'es' if len(processes) > 1 else ''} {numbers}"


def _logs(processes: list[int]) -> str:
    return ", ".join(f"logs/process_{process:05}.log" for process in processes[:10])


def _numbers(pattern: re.Pattern[str], output: str) -> list[int]:
    found = pattern.search(output)
    return sorted({int(number) for number in _NUMBER.findall(found[1])}) if found else []
