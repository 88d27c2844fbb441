"""The user's mistakes, as messages to print."""

import atexit
import contextlib
import difflib
import os
import sys
from collections.abc import Iterable, Iterator

import jax


class ConfigError(ValueError):
    """The user's mistake, as a message to print: what, which value, the nearest names."""


class TrainingStopped(RuntimeError):
    """Training cannot go on, as a message to print; all processes find the same."""


def did_you_mean(name: object, choices: Iterable[object]) -> str:
    """The nearest of `choices`, or all of them, as a sentence."""
    names = [str(choice) for choice in choices]
    if near := difflib.get_close_matches(str(name), names, n=3):
        return f"Did you mean {' or '.join(near)}?"
    return f"There are: {', '.join(names)}." if names else "There are none."


class StoppedEarly(RuntimeError):
    """A signal asked the run to stop, and its checkpoint is whole; all processes find the same."""


def in_words(error: BaseException) -> str:
    """The message of `error` and its notes, without the number that Python puts before some."""
    numbered = isinstance(error, OSError) and error.filename is None and error.strerror
    return " ".join([numbered or str(error), *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Where only the user's settings and files can be wrong: turns errors into `ConfigError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(in_words(error)) from error


@contextlib.contextmanager
def ends_other_processes() -> Iterator[None]:
    """Where processes need each other at every step: one that fails is soon noticed by the others.

    Those wait for it in a collective operation, while JAX would have it wait for them at exit, for
    five minutes. It exits without that wait instead, with status 1, after the usual traceback. A
    `ConfigError`, `TrainingStopped` or `StoppedEarly` passes: all processes find the same.
    """
    try:
        yield
    except (ConfigError, TrainingStopped, StoppedEarly):
        raise
    except BaseException:
        if jax.process_count() > 1:
            atexit.register(_exit_at_once)  # before what JAX registered: the last comes first
        raise


def _exit_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
