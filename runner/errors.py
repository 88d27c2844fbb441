"""The user's mistakes, as messages to print."""

import contextlib
import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmlib.storage.failures import storage_failure

if TYPE_CHECKING:
    from lmlib.runs.goodput import Ended  # which takes long to import

_OF_TRACEBACKS = "JAX has removed its internal frames"  # a note of JAX's
_FROM_FIDDLE = re.compile(r"\s*Fiddle context: .*? at <root>\.?(.*?) with .*", re.DOTALL)


class ConfigError(ValueError):
    """The user's mistake, as a message to print: what, which value, the nearest names."""


class TrainingStopped(RuntimeError):
    """Training cannot go on, as a message to print; all processes find the same."""


class Diverged(TrainingStopped):
    """Updates were skipped one after the other."""


class StoppedEarly(RuntimeError):
    """A signal asked the run to stop, and its checkpoint is whole; all processes find the same."""


class WorkdirLost(RuntimeError):
    """The workdir is no longer this run's: deleted, or another's; process 0 alone finds it."""


# What all processes of a run find alike.
AGREED = (ConfigError, TrainingStopped, StoppedEarly)


def did_you_mean(name: object, choices: Iterable[object]) -> str:
    """The nearest of `choices`, or all of them, as a sentence."""
    names = [str(choice) for choice in choices]
    if near := difflib.get_close_matches(str(name), names, n=3):
        return f"Did you mean {' or '.join(near)}?"
    return f"There are: {', '.join(names)}." if names else "There are none."


def in_words(error: BaseException) -> str:
    """The message of `error` and its notes, without the number that Python puts before some.

    Of what Fiddle adds, with all arguments, only the part of the config where the error came up.
    """
    notes = [note for note in getattr(error, "__notes__", ()) if _OF_TRACEBACKS not in note]
    if isinstance(error, OSError) and (error.errno, type(error.filename)) == (errno.ENOSPC, str):
        file = Path(error.filename)
        error = storage_failure(f"write {file}", file.parent, errno.ENOSPC)
    numbered = isinstance(error, OSError) and error.filename is None and error.strerror
    text = " ".join([numbered or str(error), *notes])
    return _FROM_FIDDLE.sub(lambda found: f" (in {found[1]})" if found[1] else "", text)


def how_ended(error: BaseException) -> "Ended":
    """The state of a run that `error` has ended, in a word."""
    interrupted = isinstance(error, (StoppedEarly, KeyboardInterrupt))
    return "diverged" if isinstance(error, Diverged) else "interrupted" if interrupted else "failed"


def lack(error: BaseException) -> str | None:
    """What Python, NumPy or JAX found too little of, in words; `None` if it is no such error."""
    text = in_words(error).partition("\n")[0]  # JAX may list a whole program after it
    # JAX's class is a RuntimeError, and to import it is to import JAX.
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
    """A block in which a lack of memory is the user's mistake; `smaller` says what would help."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(f"{error}: {smaller}") from error


@contextlib.contextmanager
def user_errors(kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """A block whose errors of these kinds are the user's, by default those of settings and files:
    raises them as `ConfigError`."""
    try:
        yield
    except kinds as error:
        raise ConfigError(in_words(error)) from error
