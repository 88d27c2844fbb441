"""Runs `python -m MODULE`, `python -c CODE` or `python FILE` without the seconds that imports take.

A server has imported everything and forks. `fresh_process` starts a Python that does not fork.
"""

import atexit
import dataclasses
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import runner

ROOT = Path(runner.__file__).parents[1]
SECONDS = 600  # that `run_forked` may take
_ASKING = threading.Lock()  # a server is asked by one thread at a time
_SERVER = Path(__file__).with_name("fork_server.py")
# Python or a package reads variables with these prefixes when it starts: they need a new server.
_READ_AT_IMPORT = ("JAX_", "PYTHON")


def paths_of(root: Path) -> str:
    """Returns PYTHONPATH for a copy of lmlib in `root`."""
    return os.pathsep.join([str(root), str(ROOT / "tests/shared")])


PATHS = paths_of(ROOT)


class ForkedProcess:
    """A running process, with a part of the interface of `subprocess.Popen`."""

    def __init__(
        self,
        *arguments: str | os.PathLike[str],
        stdout: IO[bytes] | IO[str] | int,
        stderr: IO[bytes] | IO[str] | int,
        stdin: IO[bytes] | IO[str] | int | None = None,
        cwd: Path = ROOT,
        environment: Mapping[str, str | None] | None = None,
    ):
        """Starts `python ARGUMENTS` in `cwd`; None in `environment` removes a variable."""
        self.args = [os.fspath(each) for each in arguments]
        self.returncode: int | None = None
        variables = _environment(environment)
        request = {"arguments": self.args, "folder": str(cwd), "environment": variables}
        self._pipe, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        streams = [
            each if isinstance(each, int) else each.fileno()
            for each in (nothing if stdin is None else stdin, stdout, stderr)
        ]
        sent = json.dumps(request).encode() + b"\n"
        with _ASKING:
            server = _server(frozenset(filter(_is_read_at_import, variables.items())))
            begun = socket.send_fds(server, [sent], [*streams, theirs])
            server.sendall(sent[begun:])
        os.close(theirs)
        os.close(nothing)
        self.pid = self._told()

    def poll(self) -> int | None:
        """Its exit status if it has ended; of a signal, the negative number."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit status; raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            told = select.poll()
            told.register(self._pipe, select.POLLIN)
            if not told.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._told()
            os.close(self._pipe)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _told(self) -> int:
        """A number that the server's side of the pipe writes in one go."""
        line = os.read(self._pipe, 100)
        assert line.endswith(b"\n"), "the server, or what waits for the process, has ended"
        return int(line)


def fresh_process(
    *arguments: str | os.PathLike[str],
    stdout: IO[bytes] | IO[str] | int,
    stderr: IO[bytes] | IO[str] | int,
    cwd: Path = ROOT,
    environment: Mapping[str, str | None] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a process like `ForkedProcess`, without forking."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
    )


@dataclasses.dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run_forked(
    *arguments: str | os.PathLike[str],
    piped: str = "",
    cwd: Path = ROOT,
    environment: Mapping[str, str | None] | None = None,
) -> Ended:
    """Runs `python ARGUMENTS` to its end, at most `SECONDS`, with `piped` as its input."""
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(piped)
        given.seek(0)
        process = ForkedProcess(
            *arguments, stdin=given, stdout=out, stderr=err, cwd=cwd, environment=environment
        )
        try:
            returncode = process.wait(SECONDS)
        finally:
            process.kill()
        out.seek(0), err.seek(0)
        return Ended(returncode, out.read(), err.read())


def succeeded(*arguments: str | os.PathLike[str], **settings: Any) -> Ended:
    """Calls `run_forked`; the exit status must be 0."""
    ended = run_forked(*arguments, **settings)
    assert ended.returncode == 0, ended.stderr
    return ended


def _environment(changes: Mapping[str, str | None] | None) -> dict[str, str]:
    variables = {**os.environ, "PYTHONPATH": PATHS, **(changes or {})}
    return {name: value for name, value in variables.items() if value is not None}


def _is_read_at_import(variable: tuple[str, str]) -> bool:
    name, _ = variable
    return name.startswith(_READ_AT_IMPORT) and name != "PYTHONPATH"


@functools.cache
def _server(variables: frozenset[tuple[str, str]]) -> socket.socket:
    """The connection to the server of processes with these variables."""
    ours, theirs = socket.socketpair()
    others = {each for each in os.environ.items() if not _is_read_at_import(each)}
    server = subprocess.Popen(
        [sys.executable, str(_SERVER), str(theirs.fileno())],
        # No threads of NumPy's: a fork would be without them.
        env={
            **dict(others),
            **dict(variables),
            "PYTHONPATH": PATHS,
            "OPENBLAS_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours
