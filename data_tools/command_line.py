"""The common style of commands: one-line errors, one progress line, and the exit status."""

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from absl import app, flags, logging

from lmlib.terminal.quantities import duration_text
from lmlib.terminal.text import guard_terminals

# Flags of texts, in which `~` is an ordinary character. In all other flags it is the home folder.
TEXTS = {"bos_token", "document_separator", "eos_token", "prompt", "special_tokens", "stop"}
_HELP = {"--help", "-help", "-h", "--helpshort", "--helpfull"}
MISTAKE, INTERRUPTED = 2, 130  # exit status

# Called with the counts so far, by unit, and the completed fraction, None if unknown.
Progress = Callable[[Mapping[str, int], float | None], None]

_SECONDS_BETWEEN_LINES = 5.0


def run(name: str, command: Callable[[Sequence[str]], int], resumable: bool = False) -> NoReturn:
    """Runs `command` with the arguments that are not flags; exits with the status it returns.

    An invalid flag, and an OSError or ValueError of `command`, prints one line on stderr that
    begins with `name`, and exits with status 2; Ctrl-C exits with 130. --help shows the docstring
    of `__main__`, its flags and the adopted ones. Terminals show control characters escaped.

    If it is `resumable`, a RuntimeError is one line as well, and Ctrl-C and SIGTERM exit with 128
    plus the signal's number, after a message that the same command continues.
    """
    guard_terminals()
    logging.get_absl_handler().python_handler.setStream(sys.stderr)

    def main(arguments: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # JAX logs each backend that it does not find
        if isinstance(sys.stdout, io.TextIOWrapper):  # documents may contain any characters
            sys.stdout.reconfigure(errors="backslashreplace")
        for number in (signal.SIGINT, signal.SIGTERM) if resumable else ():
            signal.signal(number, _stop)
        try:
            status = command(arguments[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return MISTAKE
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not resumable:
                raise
            return _mistake(name, error)
        except _StoppedError as stopped:
            number = signal.Signals(stopped.args[0])
            print(f"{name}: {number.name}; run the same command to continue", file=sys.stderr)
            return 128 + number
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            return INTERRUPTED
        return status

    def parsed(arguments: Sequence[str]) -> list[str]:
        if not _HELP.isdisjoint(arguments):
            app.usage(shorthelp="--helpfull" not in arguments, writeto_stdout=True)
            sys.exit(0)
        try:
            others = flags.FLAGS(arguments)
            expand_home(flags.FLAGS)
            return others
        except flags.Error as error:
            sys.exit(_mistake(name, error))

    app.run(main, flags_parser=parsed)


def check_no_arguments(arguments: Sequence[str]) -> None:
    """Raises ValueError for arguments of a command that takes only flags."""
    if arguments:
        raise ValueError(f"unexpected argument {arguments[0]!r}: settings are --name=value")


def expand_home(values: flags.FlagValues) -> None:
    """Replaces `~` or `~user` at the beginning of each value by the home folder, except in `TEXTS`.

    Shells do this at the beginning of a word, but not after `--workdir=`.
    """
    for name in set(values) - TEXTS:
        flag = values[name]
        if isinstance(flag.value, str):
            flag.value = os.path.expanduser(flag.value)
        elif isinstance(flag.value, list):
            flag.value = [os.path.expanduser(x) if isinstance(x, str) else x for x in flag.value]


class _StoppedError(BaseException):
    """Raised on a signal, from Ctrl-C or a batch system; its argument is the signal's number."""


def _stop(number: int, frame: FrameType | None) -> None:
    for later in (signal.SIGINT, signal.SIGTERM):
        signal.signal(later, signal.SIG_IGN)  # already stopping
    raise _StoppedError(number)


def _mistake(name: str, error: Exception) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        text = error.strerror  # no file: don't print an errno before the message
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    return MISTAKE


def aligned(rows: Mapping[str, str | None]) -> str:
    """Formats a summary, a line for each row that is not None."""
    return "\n".join(f"{name:<18}{value}" for name, value in rows.items() if value is not None)


def no_progress(counts: Mapping[str, int], fraction: float | None) -> None:
    """Ignores progress."""


class ProgressLine:
    """Prints a line to stderr every few seconds: counts, current speed, time left."""

    def __init__(self) -> None:
        # The speed excludes the work of earlier runs, and the start of workers.
        self._first: tuple[float, int, float | None] | None = None
        self._printed = 0.0

    def __call__(self, counts: Mapping[str, int], fraction: float | None) -> None:
        now, unit = time.monotonic(), list(counts)[-1]
        if self._first is None:
            self._first, self._printed = (now, counts[unit], fraction), now
        if now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        begun, first_count, first_fraction = self._first
        parts = [f"{count:,} {name}" for name, count in counts.items()]
        parts.append(f"{(counts[unit] - first_count) / (now - begun):,.0f} {unit}/s")
        if fraction is not None and first_fraction is not None and fraction > first_fraction:
            left = (now - begun) * (1 - fraction) / (fraction - first_fraction)
            parts.append(f"{fraction:.0%} done, {duration_text(left)} left")
        print(", ".join(parts), file=sys.stderr)
