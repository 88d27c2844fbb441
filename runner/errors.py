"""User errors, as messages to print."""

import contextlib
import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmlib.storage.failures import storage_failure

if TYPE_CHECKING:
    from lmlib.runs.goodput import Ended  # slow to import

_OF_TRACEBACKS = "JAX has removed its internal frames"  # a note that JAX adds
_FROM_FIDDLE = re.compile(r"\s*Fiddle context: .*? at <root>\.?(.*?) with .*", re.DOTALL)


class ConfigError(ValueError):
    """A mistake of the user. The message names the value and the nearest valid names."""


class TrainingStopped(RuntimeError):
    """Training cannot go on. Every process raises it with the same message."""


class Diverged(TrainingStopped):
    """Too many updates in succession were skipped."""


class StoppedEarly(RuntimeError):
    """A signal asked the run to stop, and its checkpoint is saved. Every process raises it."""


class WorkdirLost(RuntimeError):
    """The workdir was deleted or belongs to another run. Only process 0 raises it."""


# Errors that every process of a run raises alike.
AGREED = (ConfigError, TrainingStopped, StoppedEarly)


def did_you_mean(name: object, choices: Iterable[object]) -> str:
    """Returns a sentence with the nearest of `choices`, or with all of them."""
    names = [str(choice) for choice in choices]
    if near := difflib.get_close_matches(str(name), names, n=3):
        return f"Did you mean {' or '.join(near)}?"
    return f"There are: {', '.join(names)}." if names else "There are none."


def error_text(error: BaseException) -> str:
    """Returns the message of `error` with its notes, without the error number of an OSError.

    Fiddle adds all arguments of a config; only the path of the failing part is kept.
    """
    notes = [note for note in getattr(error, "__notes__", ()) if _OF_TRACEBACKS not in note]
    if isinstance(error, OSError) and (error.errno, type(error.filename)) == (errno.ENOSPC, str):
        file = Path(error.filename)
        error = storage_failure(f"write {file}", file.parent, errno.ENOSPC)
    numbered = isinstance(error, OSError) and error.filename is None and error.strerror
    text = " ".join([numbered or str(error), *notes])
    return _FROM_FIDDLE.sub(lambda found: f" (in {found[1]})" if found[1] else "", text)


def how_ended(error: BaseException) -> "Ended":
    """Returns how `error` ended a run: "diverged", "interrupted" or "failed"."""
    interrupted = isinstance(error, (StoppedEarly, KeyboardInterrupt))
    return "diverged" if isinstance(error, Diverged) else "interrupted" if interrupted else "failed"


def out_of_memory_text(error: BaseException) -> str | None:
    """Returns the message of an out-of-memory error of Python, NumPy or JAX, else `None`."""
    text = error_text(error).partition("\n")[0]  # JAX may append a whole program
    # JAX's error class is a RuntimeError; importing it would import JAX.
    from_jax = isinstance(error, RuntimeError) and re.search("out of memory", str(error), re.I)
    if from_jax or isinstance(error, MemoryError):
        return f"out of memory{': ' * bool(text)}{text}"
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return (
            f"{text}: memory, or the limit of processes (ulimit -u, or a container's), is used up"
        )
    return None


@contextlib.contextmanager
def chosen_sizes(smaller: str) -> Iterator[None]:
    """Context manager: running out of memory raises ConfigError; `smaller` says what would help."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(f"{error}: {smaller}") from error


@contextlib.contextmanager
def user_errors(kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Context manager: raises errors of these kinds as `ConfigError`.

    Wrong settings and files raise errors of the default kinds.
    """
    try:
        yield
    except kinds as error:
        raise ConfigError(error_text(error)) from error
