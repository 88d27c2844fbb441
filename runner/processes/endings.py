"""How a process of a run ended, and which other process was the reason."""

import dataclasses
import signal

from runner.command_line.exit_status import FINISHED, MISTAKE, PEER_ENDED, SIGNALLED, STOPPED
from runner.processes import jax_messages


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a supervisor exits with and says; `is_news` unless the process has said it itself."""

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
    """The ending of a supervised process.

    Args:
      returncode: negative for a signal, as `subprocess` has it.
      output: the last of what it wrote to stderr.
      process: its number, if it came to know it.
      joined: whether it ever found the others, or that there are none.
      connected: whether JAX has ever connected it to them.
      heartbeat_seconds, startup_seconds: the limits it was given.
    """
    if returncode in (FINISHED, STOPPED):
        return Ending(returncode)
    name = "this process" if process is None else f"process {process}"
    if returncode == MISTAKE:
        # Once connected all processes find the same mistake, and process 0 says it.
        return Ending(
            MISTAKE, "" if joined else _last_line(output), is_news=process not in (0, None)
        )
    aborted = returncode == -signal.SIGABRT
    if aborted and not connected:
        return Ending(MISTAKE, f"error: {name} {_alone(startup_seconds)}")
    if aborted and (reason := _missed(output, heartbeat_seconds)):
        return Ending(
            PEER_ENDED,
            f"error: {name} ends because {reason}; the same command goes on from the newest "
            "checkpoint",
        )
    if returncode < 0:
        number = -returncode
        killed = signal.Signals(number).name
        hint = ", perhaps for want of memory" if number == signal.SIGKILL else ""
        return Ending(SIGNALLED + number, f"error: {name} was ended by {killed}{hint}")
    reason = _last_line(output).removeprefix("error: ")
    return Ending(returncode, f"error: {name} failed: {reason}", process != 0)


def _alone(seconds: int) -> str:
    return (
        f"did not find the others within {seconds} s: see that each of them runs, and that they "
        "may connect to each other without a proxy (grpc_proxy); or raise --startup_seconds. If it "
        "is the only one, in an interactive shell of SLURM's say, give --distributed=off"
    )


def _missed(output: str, heartbeat_seconds: int) -> str:
    """Which process the others missed, and how; empty if the output does not say."""
    if ended := jax_messages.unhealthy(output):
        return (
            f"{_listed(ended)} ended or stopped answering (nothing heard for {heartbeat_seconds} "
            f"s); {_logs(ended)} may say why"
        )
    if jax_messages.lost_coordinator(output):
        return (
            "process 0, the coordinator, ended, stopped answering or cannot be reached; "
            f"{_logs([0])} may say why"
        )
    if late := jax_messages.late_at_barrier(output):
        return f"{_listed(late)} did not come to a barrier in time; {_logs(late)} may say why"
    if jax_messages.aborted(output):
        return "another process ended or stopped answering; the logs of the others may say why"
    return ""


def _last_line(output: str) -> str:
    return output.rstrip().rpartition("\n")[2]


def _listed(processes: list[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _logs(processes: list[int]) -> str:
    return ", ".join(f"logs/process_{process:05}.log" for process in processes)
