"""Checks that all processes of a run have the same code, settings, errors and files."""

import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lmlib.data.resumable import gather_states
from runner.errors import AGREED, ConfigError, user_errors

_SHOWN = 6  # differences in a message
_LONGEST_VALUE = 40  # characters of a value in a message; digests are longer
_APPEARS_SECONDS = 10.0


def require_equal_devices() -> None:
    """Raises ConfigError on all processes unless they have equal numbers of devices.

    It must run before any gather: JAX gathers with an array of shape [processes, local devices].
    """
    counts = [0] * jax.process_count()
    for device in jax.devices():
        counts[device.process_index] += 1
    if len(set(counts)) > 1:
        firsts = "; ".join(f"{n} on process {counts.index(n)}" for n in dict.fromkeys(counts))
        raise ConfigError(
            f"the processes have different numbers of devices ({firsts}): give all the same number"
        )


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Raises a ConfigError from the block on all processes; every process must enter it."""
    mistake: ConfigError | None = None
    try:
        yield
    except ConfigError as error:
        mistake = error
    messages = [each["mistake"] for each in _gathered({"mistake": mistake and str(mistake)})]
    if mistake is not None and len(set(messages)) == 1:
        raise mistake
    if found := [f"process {n}: {message}" for n, message in enumerate(messages) if message]:
        raise ConfigError("\n".join(found)) from mistake


def require_same(facts: Mapping[str, Mapping[str, str]]) -> None:
    """Raises ConfigError on all processes unless `facts` are the same on each of them.

    Every process must call it.

    Args:
      facts: groups of named values, such as {"the code": {"train.py": digest}}. All processes must
        have the same groups.
    """
    digests = {
        what: hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        for what, parts in facts.items()
    }
    gathered = _gathered(digests)
    for what, parts in facts.items():
        if len({each[what] for each in gathered}) > 1:
            raise ConfigError(differing(what, _gathered(dict(parts))))


def differing(what: str, found: Sequence[Mapping[str, str]]) -> str:
    """Returns the error message for a group that differs between processes.

    Args:
      what: the name of the group.
      found: the group's values on each process.
    """
    first = found[0]
    others = [n for n, parts in enumerate(found) if parts != first]
    shown = found[others[0]]
    names = sorted(n for n in shown.keys() | first.keys() if shown.get(n) != first.get(n))
    told = []
    for name in names[:_SHOWN]:
        values = shown.get(name) or "absent", first.get(name) or "absent"
        short = max(map(len, values)) <= _LONGEST_VALUE
        told.append(f"{name}: {values[0]} instead of {values[1]}" if short else name)
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return (
        f"{what} of process {', '.join(map(str, others))} differs from process 0 "
        f"({', '.join(told + more)}): start all processes with the same code, packages, "
        "experiment, fiddlers, overrides, flags and JAX environment variables"
    )


@dataclasses.dataclass(frozen=True)
class Read:
    """Data or weights that a process reads.

    Attributes:
      digests: digests of the content.
      places: absolute paths or URLs, for messages.
    """

    digests: Sequence[str]
    places: Sequence[str]


def require_same_reads(read: Callable[[], Mapping[str, Read]]) -> None:
    """Raises ConfigError on all processes unless they all read the same content.

    Every process must call it. A run of one process does not call `read`.

    Args:
      read: returns this process's data and weights by name. All processes must have the same names.
    """
    if jax.process_count() == 1:
        return
    with agreed(), user_errors():
        reads = {name: dataclasses.asdict(each) for name, each in read().items()}
    if problem := difference_of_reads(_gathered({"host": socket.gethostname()} | reads)):
        raise ConfigError(problem)


def difference_of_reads(processes: Sequence[Mapping[str, Any]]) -> str | None:
    """Describes the first process that reads other content than process 0; `None` if all agree.

    Args:
      processes: for each process, its "host", and the fields of each `Read` by name.
    """
    first = processes[0]
    for name in [each for each in first if each != "host"]:  # same order on all processes
        for number, process in enumerate(processes):
            if process[name]["digests"] != first[name]["digests"]:
                here, there = (
                    f"{', '.join(each[name]['places'])} on {each['host']}"
                    for each in (process, first)
                )
                return (
                    f"{name} of process {number} differs from process 0 ({here}; process 0 has "
                    f"{there}): give all processes the same. A relative path means another folder "
                    "in each working directory"
                )
    return None


def require_same_workdir(file: Path, text: str) -> None:
    """Raises ConfigError on all processes unless all have the same workdir.

    Each process looks for a file that process 0 has written. Every process must call it.

    Args:
      file: a file in the workdir, already written.
      text: random text from process 0 that the file contains.
    """
    if jax.process_count() == 1:
        return
    text, deadline = from_first(text), time.monotonic() + _APPEARS_SECONDS
    sees = False
    while not sees and time.monotonic() < deadline:  # network file systems may lag
        with contextlib.suppress(OSError, UnicodeDecodeError):
            sees = text in file.read_text()
        time.sleep(0.0 if sees else 0.1)
    place = f"{file.parent.absolute()} on {socket.gethostname()}"
    answers = _gathered({"sees": sees, "place": place})
    blind = [n for n, answer in enumerate(answers) if not answer["sees"]]
    if blind:
        raise ConfigError(
            f"process {blind[0]} does not see the files of process 0: its workdir is "
            f"{answers[blind[0]]['place']}, and process 0 has {answers[0]['place']}: give all "
            "processes the same --workdir, on a file system that all of them reach"
        )


def from_first(value: Any) -> Any:
    """Returns the JSON value of process 0 on all processes; every process must call it."""
    if jax.process_count() == 1:
        return value
    return gather_states({"value": value if jax.process_index() == 0 else None})[0]["value"]


def _gathered(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the values of all processes."""
    return [value] if jax.process_count() == 1 else gather_states(value)


@contextlib.contextmanager
def ends_other_processes() -> Iterator[None]:
    """Ends the other processes soon after the block fails on this one.

    The other processes wait for this one in a collective operation, while JAX makes this process
    wait for them at exit, for five minutes. So it exits without that wait, with status 1, after the
    usual traceback. Errors of the types `AGREED` are only re-raised, since all processes raise
    them.
    """
    try:
        yield
    except AGREED:
        raise
    except BaseException:
        if jax.process_count() > 1:
            # Runs before JAX's handler: the last handler that is registered runs first.
            atexit.register(_exit_at_once)
        raise


def _exit_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
