"""Explains how a process of a run ended, and which other process caused it.

JAX reports the cause only in messages. tests/runner/processes/test_processes.py makes JAX
write each one.
"""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from runner.command_line.exit_status import FINISHED, MISTAKE, PEER_ENDED, SIGNALLED, STOPPED

# JAX's coordination service writes these before it aborts a process, with one name per line.
_UNHEALTHY = re.compile(r"unhealthy \(stopped sending heartbeats\):\s*(.*?)\s*The tasks", re.DOTALL)
_BARRIER = re.compile(r"Some timed out task names:\s*(.*?)\s*(?:\[type|$)", re.DOTALL)
_SILENT = re.compile(
    r"Failed to send RPC to coordination service"
    r"|DEADLINE_EXCEEDED[^\n]*\s+RPC: /\S*CoordinationService/Heartbeat"
)
_NUMBER = re.compile(r"(\d+)\s*(?:$|[\n,])")
_STATUS = re.compile(r"absl::Status: ([^\n]*)")


class Ending(NamedTuple):
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
    connected: bool,
    heartbeat_seconds: int,
    startup_seconds: int,
) -> Ending:
    """Returns the ending of a supervised process.

    Args:
      returncode: as in `subprocess`, negative for a signal.
      output: the end of the process's stderr.
      process: the process's number, `None` if it ended before it knew the number.
      connected: True if JAX connected it to the other processes.
      heartbeat_seconds, startup_seconds: the limits of the process, for messages.
    """
    if returncode in (FINISHED, STOPPED):
        return Ending(returncode)
    name = "this process" if process is None else f"process {process}"
    last_line = output.rstrip().rpartition("\n")[2]
    if returncode == MISTAKE:
        # Connected processes all find the same mistake, and process 0 reports it.
        return Ending(MISTAKE, "" if connected else last_line, is_news=process not in (0, None))
    aborted = returncode == -signal.SIGABRT
    if aborted and not connected:
        reason = f" ({found[1]})" if (found := _STATUS.search(output)) else ""
        return Ending(
            MISTAKE,
            f"error: {name} did not find the others within {startup_seconds} s{reason}: check that "
            "each of them runs with the same --coordinator and --num_processes and its own "
            "--process_id, and that they can connect to each other without a proxy (grpc_proxy); "
            "or raise --startup_seconds. If this is the only process, for example in an "
            "interactive SLURM shell, give --distributed=off",
        )
    if aborted and (reason := _missed(output, heartbeat_seconds)):
        return Ending(
            PEER_ENDED,
            f"error: {name} ends because {reason} may say why; the same command resumes from the "
            "newest checkpoint",
        )
    if returncode < 0:
        number = signal.Signals(-returncode)
        hint = ", perhaps for lack of memory" if number == signal.SIGKILL else ""
        return Ending(SIGNALLED + number, f"error: {name} was ended by {number.name}{hint}")
    reason = last_line.removeprefix("error: ")
    return Ending(returncode, f"error: {name} failed: {reason}", process != 0)


def _missed(output: str, heartbeat_seconds: int) -> str:
    """Names the process that stopped responding, and its log; empty if unknown."""
    if ended := _numbers(_UNHEALTHY, output):
        silence = f"no heartbeat for {heartbeat_seconds} s"
        return f"{_named(ended)} ended or stopped answering ({silence}); {_logs(ended)}"
    if _SILENT.search(output):
        gone = "ended, stopped answering or cannot be reached"
        return f"process 0, the coordinator, {gone}; {_logs([0])}"
    if late := _numbers(_BARRIER, output):
        return f"{_named(late)} did not reach a barrier in time; {_logs(late)}"
    if "the JAX distributed service detected fatal errors" in output:
        return "another process ended or stopped answering; the logs of the others"
    return ""


def detects_nothing(error: BaseException) -> bool:
    """True if `jax.distributed.initialize` raised `error` because no launcher was detected."""
    return "coordinator_address should be defined" in str(error)


def _named(processes: Sequence[int]) -> str:
    numbers = ", ".join(map(str, processes[:10])) + ", …" * (len(processes) > 10)
    return f"process{'es' if len(processes) > 1 else ''} {numbers}"


def _logs(processes: Sequence[int]) -> str:
    return ", ".join(f"logs/process_{process:05}.log" for process in processes[:10])


def _numbers(pattern: re.Pattern[str], output: str) -> list[int]:
    found = pattern.search(output)
    return sorted({int(number) for number in _NUMBER.findall(found[1])}) if found else []
