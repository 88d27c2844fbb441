"""Runs commands: parses flags, shows errors briefly, and sets the exit status."""

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
    error_text,
    out_of_memory_text,
)

DEBUG = flags.DEFINE_bool("debug", False, "show the traceback of an error, a mistake's too")

# Errors that need no traceback: their messages say what failed, where, and what to do.
_TOLD = (TrainingStopped, WorkdirLost, OSError, DamagedDataError)
_THREADS_SECONDS = 5.0  # wait for threads to end by themselves
_HELP = {"--help", "-help", "-h", "--helpshort", "--helpfull"}
_taken: list[str] | None = None  # positional arguments found by `take_flags`


def run(
    command: Callable[[Sequence[str]], int], more_help: Callable[[], str] = lambda: ""
) -> NoReturn:
    """Runs `command` with the positional arguments, and exits with the status that it returns.

    Errors, including wrong flags, are shown on stderr, and determine the exit status (`exit_code`).
    On terminals, control characters in any output are shown as text.

    Args:
      more_help: called after the flags are parsed; returns text that `--help` shows after the
        docstring of `__main__`.
    """
    if _taken is None:
        _prepare_streams()

    def main(arguments: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # JAX logs each backend that it does not find
        if isinstance(sys.stdout, io.TextIOWrapper):  # a model may generate any characters
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            status = command(arguments[1:])
        except (Exception, KeyboardInterrupt) as error:
            tell(error, DEBUG.value)
            status = exit_code(error)
        threading.Thread(target=_end_threads, args=(status,), name="end", daemon=True).start()
        return status

    taken = _taken
    parse = functools.partial(_parsed, more_help) if taken is None else lambda _: taken
    app.run(main, flags_parser=parse)


def take_flags(more_help: Callable[[], str] = lambda: "") -> None:
    """Parses the flags before slow imports, so that `--help` and wrong flags respond at once.

    A later call of `run` uses the result.
    """
    global _taken
    _prepare_streams()
    app.define_help_flags()
    _taken = _parsed(more_help, sys.argv)


def _prepare_streams() -> None:
    guard_terminals()
    logging.get_absl_handler().python_handler.setStream(sys.stderr)


def _end_threads(status: int) -> None:
    """Ends this process even if non-daemon threads are running, for which Python would wait."""
    threading.main_thread().join()
    deadline = time.monotonic() + _THREADS_SECONDS
    left = [thread for thread in threading.enumerate() if not thread.daemon]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [repr(thread.name) for thread in left if thread.is_alive()]
    if not names:
        return
    told = f"WARNING: ending although threads still run: {', '.join(names)}; the code that"
    print(f"{told} started them, such as a callback, must end them", file=sys.stderr)
    jax = sys.modules.get("jax")
    with contextlib.suppress(Exception):  # no error may prevent the exit
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
    axes = sys.modules.get("lmlib.parallel.axes")  # not imported here, since that imports JAX
    return isinstance(error, (ConfigError, getattr(axes, "PartError", ConfigError)))


def tell(error: BaseException, debug: bool) -> None:
    """Writes `error` to stderr: its message if that is sufficient, otherwise a traceback.

    Args:
      debug: True for a traceback in any case.
    """
    sys.stdout.flush()
    lacking = out_of_memory_text(error)
    mistake = _is_mistake(error)
    if debug or not (lacking or mistake or isinstance(error, (*_TOLD, StoppedEarly))):
        traceback.print_exception(error)
    elif isinstance(error, StoppedEarly):
        print(error, file=sys.stderr)
    else:
        text = error_text(error)
        if mistake:
            text = " ".join(text.split())  # other messages may end with a table
        elif lacking:
            text = f"{lacking} (--debug shows where)"
        print(f"error: {text}", file=sys.stderr)
    sys.stderr.flush()


def commands() -> dict[str, Path]:
    """Returns all commands as the user types them, with their files.

    Commands are the files in `runner` that define `main`, and the subfolders of `runner` and
    `data_tools` that have a `__main__.py`.
    """
    ours, theirs = Path(__file__).parents[1], Path(data_tools.__file__).parent
    found = {"runner": ours / "__main__.py"}
    for file in sorted(ours.glob("[!_]*.py")):
        if "\ndef main(" in file.read_text("utf-8"):
            found[f"runner.{file.stem}"] = file
    for root in (ours, theirs):
        for file in sorted(root.glob("*/__main__.py")):
            found[f"{root.name}.{file.parent.name}"] = file
    return {f"python -m {name}": file for name, file in found.items()}


def listed(title: str, entries: Mapping[str, str]) -> str:
    """Formats a list for `--help`, with one line per name."""
    width = max(map(len, entries), default=0)
    lines = [f"  {name:<{width}}  {line}" for name, line in entries.items()]
    return "\n".join([f"\n{title}:", *lines, ""])


def first_lines(files: Mapping[str, Path]) -> dict[str, str]:
    """Returns the first docstring line of each file, by its name."""
    return {name: first_line(file) for name, file in files.items()}


def first_line(file: Path) -> str:
    """Returns the first docstring line of a Python file without running it."""
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]


def _parsed(more_help: Callable[[], str], arguments: Sequence[str]) -> list[str]:
    """Parses `arguments` and returns the positional ones; shows the help if asked.

    `--fdl.x=1` and `--fdl.x 1` are short for Fiddle's flag `--fdl_set=x=1`.
    """
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
            if value != value:  # NaN, which passes all bounds
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
    """Writes a line to stderr and flushes it."""
    print(line, file=sys.stderr, flush=True)
