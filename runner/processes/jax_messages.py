"""Messages of JAX that a run reads, since JAX tells what they say in no other way.

tests/runner/test_jax_messages.py has JAX write each of them.
"""

import re

# What its coordination service writes before it aborts a process. Names are one a line.
_UNHEALTHY = re.compile(r"unhealthy \(stopped sending heartbeats\):\s*(.*?)\s*The tasks", re.DOTALL)
_BARRIER = re.compile(r"Some timed out task names:\s*(.*?)\s*(?:\[type|$)", re.DOTALL)
_SILENT = re.compile(r"DEADLINE_EXCEEDED[^\n]*\s+RPC: /\S*CoordinationService/Heartbeat")
_NUMBER = re.compile(r"(\d+)\s*(?:$|[\n,])")


def unhealthy(output: str) -> list[int]:
    """The processes that `output` says stopped sending heartbeats."""
    return _numbers(_UNHEALTHY, output)


def late_at_barrier(output: str) -> list[int]:
    """The processes that `output` says did not come to a barrier."""
    return _numbers(_BARRIER, output)


def lost_coordinator(output: str) -> bool:
    """Whether `output` says that process 0 cannot be reached, or does not answer."""
    return "Failed to send RPC to coordination service" in output or bool(_SILENT.search(output))


def aborted(output: str) -> bool:
    """Whether `output` says that the coordination service ended this process, whatever for."""
    return "the JAX distributed service detected fatal errors" in output


def detects_nothing(error: BaseException) -> bool:
    """Whether `jax.distributed.initialize` raised `error` because nothing started several."""
    return "coordinator_address should be defined" in str(error)


def _numbers(pattern: re.Pattern[str], output: str) -> list[int]:
    found = pattern.search(output)
    return sorted({int(number) for number in _NUMBER.findall(found[1])}) if found else []
