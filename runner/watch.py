"""Shows runs while they train, as a page in the browser or as a view in the terminal.

    python -m runner.watch WORKDIR
    python -m runner.watch SWEEP --terminal

Arguments are workdirs, or folders that contain workdirs, such as a sweep's. Only this machine can
open the page; from another one, use ssh -L 8008:localhost:8008 HOST. See docs/pictures.md.
"""

import errno
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from lmlib.report import page
from lmlib.report.seen import Watched
from lmlib.report.server import PageServer
from lmlib.report.terminal import view
from lmlib.runs.goodput import RUNNING
from lmlib.runs.run import is_locked
from lmlib.terminal.text import TerminalText
from runner.command_line.command import run
from runner.command_line.exit_status import FINISHED
from runner.errors import ConfigError, user_errors

_TERMINAL = flags.DEFINE_bool(
    "terminal", False, "Show the runs in the terminal; in a pipe only once."
)
_PORT = flags.DEFINE_integer("port", 8008, "Port of the page.", 0, 65_535)
_SECONDS = flags.DEFINE_integer("seconds", 5, "Seconds between reads of the files.", 1, 3600)
_CLEAR = "\x1b[H\x1b[J"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    if not arguments:
        raise ConfigError("give the runs, as in: python -m runner.watch WORKDIR; see --help")
    watched = Watched(arguments)
    try:
        with user_errors():
            watched.now()
            if _TERMINAL.value:
                _watch_here(watched, arguments)
            else:
                _serve(watched)
    except KeyboardInterrupt:
        print()
    return FINISHED


def _watch_here(watched: Watched, places: Sequence[str]) -> None:
    in_terminal = isinstance(sys.stdout, TerminalText)
    while True:
        runs = watched.now()
        text = view(runs, shutil.get_terminal_size().columns)
        if isinstance(sys.stdout, TerminalText):
            sys.stdout.write_as_it_is(_CLEAR)
        print(text, flush=True)
        # A running sweep holds its own lock, also between two points.
        running = any(each.run.state.name == RUNNING for each in runs)
        if not in_terminal or not (running or any(is_locked(Path(each)) for each in places)):
            return
        time.sleep(_SECONDS.value)


def _serve(watched: Watched) -> None:
    try:
        server = PageServer(_PORT.value, lambda: page(watched.now(), _SECONDS.value))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(f"--port={_PORT.value} is in use; give another, or 0 for any") from error
    with server:
        print(f"{server.url}  (Ctrl-C to stop)", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    run(main)
