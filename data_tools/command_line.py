"""What the commands have in common: mistakes and progress told in a line, and the exit status."""

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from absl import app, flags, logging

from lmlib.terminal.text import guard_terminals

# Flags of texts, in which `~` is a character. In all other flags it is the home folder.
TEXTS = {"bos_token", "document_separator", "eos_token", "prompt", "special_tokens", "stop"}
_HELP = {"--help", "-help", "-h", "--helpshort", "--helpfull"}
MISTAKE, INTERRUPTED = 2, 130  # exit status

# Called with what was done, what there is to do, and the unit of both.
Progress = Callable[[int, int, str], None]

_SECONDS_BETWEEN_LINES = 5.0


def run(name: str, command: Callable[[Sequence[str]], int], resumable: bool = False) -> NoReturn:
    """Runs `command` with the arguments that are no flags; exits with the status it returns.

    A flag that is unknown or has no valid value, and an OSError or ValueError of `command`, is told
    in one line on stderr that begins with `name`; the status is then 2, or 130 after Ctrl-C.
    --help shows the docstring of `__main__`, its flags and those that it has adopted.
    One that is `resumable` says after Ctrl-C or SIGTERM that it goes on when it is given again; the
    status is then 128 and the signal's number. A RuntimeError of it is told as well. Terminals show
    control characters, wherever a text is from.
    """
    guard_terminals()
    logging.get_absl_handler().python_handler.setStream(sys.stderr)

    def main(arguments: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # JAX tells of each backend it does not find
        if isinstance(sys.stdout, io.TextIOWrapper):  # a document's text may be any
            sys.stdout.reconfigure(errors="backslashreplace")
        for number in (signal.SIGINT, signal.SIGTERM) if resumable else ():
            signal.signal(number, _stop)
        try:
            status = command(arguments[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # who reads the output has seen enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return MISTAKE
        except (OSError, ValueError) as error:
            return _told(name, error)
        except RuntimeError as error:
            if not resumable:
                raise
            return _told(name, error)
        except _StoppedError as stopped:
            number = signal.Signals(stopped.number)
            print(f"{name}: {number.name}; the same command goes on from here", file=sys.stderr)
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
            sys.exit(_told(name, error))

    app.run(main, flags_parser=parsed)


def expand_home(values: flags.FlagValues) -> None:
    """Replaces `~` or `~user` at the beginning of each value by the home folder, except in `TEXTS`.

    Shells do so at the beginning of a word, and not after `--workdir=`.
    """
    for name in set(values) - TEXTS:
        flag = values[name]
        if isinstance(flag.value, str):
            flag.value = os.path.expanduser(flag.value)
        elif isinstance(flag.value, list):
            expanded = [os.path.expanduser(x) if isinstance(x, str) else x for x in flag.value]
            flag.value = expanded


class _StoppedError(BaseException):
    """By a signal, from Ctrl-C or a batch system."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop(number: int, frame: FrameType | None) -> None:
    for later in (signal.SIGINT, signal.SIGTERM):
        signal.signal(later, signal.SIG_IGN)  # it is ending already
    raise _StoppedError(number)


def _told(name: str, error: Exception) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        text = error.strerror  # of no file: a number before the sentence would say nothing
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    return MISTAKE


def no_progress(done: int, total: int, unit: str) -> None:
    """Says nothing."""


class ProgressLines:
    """Prints a line to stderr every few seconds."""

    def __init__(self) -> None:
        self._begun = self._printed = time.monotonic()

    def __call__(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        per_second = done / (now - self._begun)
        print(
            f"{done:,} of {total:,} {unit} ({100 * done / max(total, 1):.1f}%), "
            f"{per_second:,.0f} {unit}/s",
            file=sys.stderr,
        )
