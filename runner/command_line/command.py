"""What all commands share: they parse flags, show errors in a few lines, exit with a status."""

import ast
import contextlib
import functools
import io
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging

import data_tools
from data_tools.command_line import expand_home
from lmlib.data.stored.metadata import DamagedDataError
from lmlib.terminal.text import guard_terminals
from runner.command_line.exit_status import FAILED, FINISHED, MISTAKE, STOPPED
from runner.errors import (
    ConfigError,
    StoppedEarly,
    TrainingStopped,
    WorkdirLost,
    in_words,
    lack,
)

DEBUG = flags.DEFINE_bool("debug", False, "show the traceback of an error, a mistake's too")

# Their messages say all that a user needs: what, where, and what to do.
_TOLD = (TrainingStopped, WorkdirLost, OSError, DamagedDataError)
_THREADS_SECONDS = 5.0  # for threads that end by themselves
_HELP = {"--help", "-help", "-h", "--helpshort", "--helpfull"}
_taken: list[str] | None = None  # what `take_flags` has found: the arguments that are no flags


def run(
    command: Callable[[Sequence[str]], int], more_help: Callable[[], str] = lambda: ""
) -> NoReturn:
    """Runs `command` with the arguments that are no flags; exits with the status it returns.

    Errors, also wrong flags, are shown on stderr; the status is then their `exit_code`. `--help`
    shows the docstring of `__main__`, and what `more_help` makes of the other flags. Terminals show
    control characters, wherever a text is from.
    """
    if _taken is None:
        _prepare_streams()

    def main(arguments: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # JAX tells of each backend that it does not find
        if isinstance(sys.stdout, io.TextIOWrapper):  # a model's text may be any
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            status = command(arguments[1:])
        except (Exception, KeyboardInterrupt) as error:
            tell(error, DEBUG.value)
            status = exit_code(error)
        threading.Thread(target=_end_threads, args=(status,), name="end", daemon=True).start()
        return status

    app.run(main, flags_parser=functools.partial(_parsed, more_help) if _taken is None else _known)


def take_flags(more_help: Callable[[], str] = lambda: "") -> None:
    """Parses the flags, as `run` does, for a file that imports what takes seconds after that:
    `--help` and mistaken flags end here. `run` then takes what was found."""
    global _taken
    _prepare_streams()
    app.define_help_flags()
    _taken = _parsed(more_help, sys.argv)


def _known(arguments: Sequence[str]) -> list[str]:
    assert _taken is not None
    return _taken


def _prepare_streams() -> None:
    guard_terminals()
    logging.get_absl_handler().python_handler.setStream(sys.stderr)


def _end_threads(status: int) -> None:
    """Ends this process although a thread that is no daemon goes on, for which Python waits."""
    threading.main_thread().join()
    deadline = time.monotonic() + _THREADS_SECONDS
    left = [thread for thread in threading.enumerate() if not thread.daemon]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [repr(thread.name) for thread in left if thread.is_alive()]
    if not names:
        return
    told = f"WARNING: all is done, but threads go on: {', '.join(names)}; this process ends"
    advice = "the code that started them, a callback say, must end them or make them daemons"
    print(f"{told} without them: {advice}", file=sys.stderr)
    jax = sys.modules.get("jax")
    with contextlib.suppress(Exception):  # nothing may keep it
        if jax is not None and jax.distributed.is_initialized():
            jax.distributed.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def exit_code(error: BaseException) -> int:
    if isinstance(error, StoppedEarly):
        return STOPPED
    return MISTAKE if _is_mistake(error) else FAILED


def _is_mistake(error: BaseException) -> bool:
    axes = sys.modules.get("lmlib.parallel.axes")  # to import it is to import JAX
    return isinstance(error, (ConfigError, getattr(axes, "PartError", ConfigError)))


def tell(error: BaseException, debug: bool) -> None:
    """Writes `error` to stderr: its message if that says all, else, or if `debug`, a traceback."""
    sys.stdout.flush()
    lacking = lack(error)
    mistake = _is_mistake(error)
    if debug or not (lacking or mistake or isinstance(error, (*_TOLD, StoppedEarly))):
        traceback.print_exception(error)
    elif isinstance(error, StoppedEarly):
        print(error, file=sys.stderr)
    else:
        text = in_words(error)
        if mistake:
            text = " ".join(text.split())  # others may end with a table
        elif lacking:
            text = f"{lacking} (--debug shows where)"
        print(f"error: {text}", file=sys.stderr)
    sys.stderr.flush()


def commands() -> dict[str, Path]:
    """Each command, as the user types it, and its file: the files directly in `runner` that
    have a `main`, its rooms that are programs, and the programs of `data_tools`."""
    ours = Path(__file__).parents[1]
    rooms, theirs = (
        sorted(folder.glob("*/__main__.py")) for folder in (ours, Path(data_tools.__file__).parent)
    )
    return (
        {"python -m runner": ours / "__main__.py"}
        | {
            f"python -m runner.{file.stem}": file
            for file in sorted(ours.glob("[!_]*.py"))
            if "\ndef main(" in file.read_text("utf-8")
        }
        | {f"python -m runner.{file.parent.name}": file for file in rooms}
        | {f"python -m data_tools.{file.parent.name}": file for file in theirs}
    )


def listed(title: str, entries: Mapping[str, str]) -> str:
    """A list for `--help`: each name with its line."""
    width = max(map(len, entries), default=0)
    lines = [f"  {name:<{width}}  {line}" for name, line in entries.items()]
    return "\n".join([f"\n{title}:", *lines, ""])


def first_lines(files: Mapping[str, Path]) -> dict[str, str]:
    """The first line of the docstring of each file, by its name."""
    return {name: first_line(file) for name, file in files.items()}


def first_line(file: Path) -> str:
    """The first line of the docstring of a Python file, which is not run."""
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]


def _parsed(more_help: Callable[[], str], arguments: Sequence[str]) -> list[str]:
    """`--fdl.x=1` and `--fdl.x 1` are short for `--fdl_set=x=1`, which Fiddle defines."""
    joined: list[str] = []
    for argument in arguments:
        if joined and re.fullmatch(r"--fdl\.[^=]+", joined[-1]) and argument[:2] != "--":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    written_out = [re.sub(r"^--fdl\.", "--fdl_set=", argument) for argument in joined]
    others = [argument for argument in written_out if argument not in _HELP]
    try:
        given = flags.FLAGS(others)
        expand_home(flags.FLAGS)
        for name, value in flags.FLAGS.flag_values_dict().items():
            if value != value:  # which no bound refuses
                raise ConfigError(f"flag --{name}={value}: {name} must be a number")
        if len(others) == len(written_out):
            return given
        main = sys.modules["__main__"]
        main.__doc__ = f"{main.__doc__}{more_help()}"
    except (flags.Error, ConfigError) as error:
        hint = "; see --help" if isinstance(error, flags.Error) else ""
        mistake = ConfigError(f"{error}{hint}")
        tell(mistake, debug=False)
        sys.exit(exit_code(mistake))
    app.usage(shorthelp="--helpfull" not in arguments, writeto_stdout=True)
    sys.exit(FINISHED)


def show(line: str) -> None:
    """Shows a line on stderr at once."""
    print(line, file=sys.stderr, flush=True)
