"""Supervises each process of a run with several processes.

When a process of the run dies, JAX aborts the others, and their Python code cannot report why. So
each process is the child of a supervisor, which stores the process's output in workdir/logs, and
searches it for the process that stopped responding.
"""

import codecs
import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

from lmlib.storage.bucket.copies import LOGS, url_of
from lmlib.storage.bucket.mirror import Mirror
from lmlib.storage.bucket.store import BucketStore
from lmlib.terminal.text import shown
from runner.command_line.exit_status import SIGNALLED
from runner.command_line.lossy_stream import LossyStream
from runner.processes.endings import Ending, ending
from runner.processes.parent import end_after
from runner.processes.stopping import StopSignals

FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
KEPT_BYTES = 1 << 18  # the end of the output, which is searched for the reason
LAST_WORDS_SECONDS = 5.0  # wait for output if children of a dead child keep it open
_VARIABLE = "RUNNER_SUPERVISOR"  # environment variable with the child's end of the connection


@dataclasses.dataclass
class Connection:
    """The supervised process's connection to its supervisor."""

    _socket: socket.socket

    @staticmethod
    def inherited() -> "Connection | None":
        """Returns this process's connection; `None` if no supervisor started it.

        From then on, this process ends when its supervisor ends for any reason.
        """
        # Removed, so that child processes of this one don't inherit it.
        descriptor = os.environ.pop(_VARIABLE, None)
        if descriptor is None:
            return None
        connection = Connection(socket.socket(fileno=int(descriptor)))
        connection._socket.set_inheritable(False)
        given = (connection._socket,)
        threading.Thread(target=end_after, args=given, name="supervised", daemon=True).start()
        return connection

    def tell(self, process: int, processes: int, *, joined: bool, connected: bool = False) -> None:
        """Reports the state of this process to its supervisor.

        Args:
          process: the number of this process.
          processes: the number of processes in the run.
          joined: True if this process has found the others.
          connected: True if JAX has connected it to the others.
        """
        fact = {
            "process": process,
            "processes": processes,
            "joined": joined,
            "connected": connected,
        }
        self._socket.sendall(json.dumps(fact).encode() + b"\n")


def supervise(
    workdir: Path, heartbeat_seconds: int, startup_seconds: int, grace_seconds: int
) -> int:
    """Runs this command again as a child process, and returns the exit code for this process.

    The child's stdout and stderr are appended to its log. The output of process 0 is also shown,
    and so is every process's reason for an early end. SIGTERM and SIGINT are forwarded as SIGTERM,
    which asks the child to stop.

    Args:
      heartbeat_seconds, startup_seconds: limits of the child, for messages.
      grace_seconds: time from the first signal until the child is killed.
    """
    ours, its = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, _VARIABLE: str(its.fileno())},
        pass_fds=[its.fileno()],
        start_new_session=True,  # the child gets signals only from this process
    )
    its.close()

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in FORWARDED:
        signal.signal(number, forward)

    ended: list[Ending] = []

    def end(number: signal.Signals, reason: str) -> None:
        ended.append(Ending(SIGNALLED + number, f"error: ended by {number.name}: {reason}"))
        child.kill()

    StopSignals(grace_seconds, lambda number: child.send_signal(signal.SIGTERM), end)
    assert child.stdout and child.stderr
    output = _Output(workdir, child.stdout, child.stderr, ours)
    output.start()
    returncode = child.wait()
    output.join(LAST_WORDS_SECONDS)
    told = (
        ended[0]
        if ended
        else ending(
            returncode,
            output.text(),
            output.process,
            output.joined,
            output.connected,
            heartbeat_seconds,
            startup_seconds,
        )
    )
    output.close(told)
    return told.exit_code


class _Output(threading.Thread):
    """Reads the child's output and its reports over the connection.

    It continues if the log or the terminal fails, since the child would block otherwise.
    """

    def __init__(
        self, workdir: Path, stdout: IO[bytes], stderr: IO[bytes], connection: socket.socket
    ):
        super().__init__(name="output", daemon=True)
        self.process: int | None = None
        self.joined = self.connected = False
        self._workdir = workdir
        self._told = _Screen(sys.stderr)
        self._screens = {stdout: _Screen(sys.stdout), stderr: self._told}
        self._connection = connection
        self._end = bytearray()
        self._facts = b""
        self._log: LossyStream | None = None
        self._log_file = workdir
        self._send_log: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Reads until the child, and all processes that it started, have closed the output."""
        with selectors.DefaultSelector() as ready:
            # The connection comes first: it tells which log the output belongs to.
            ready.register(self._connection, selectors.EVENT_READ)
            for stream in self._screens:
                ready.register(stream, selectors.EVENT_READ)
            while ready.get_map():
                streams = [key.fileobj for key, _ in ready.select()]
                if self._connection in streams and not self._hear():
                    ready.unregister(self._connection)
                for stream, screen in self._screens.items():
                    if stream in streams:
                        written = os.read(stream.fileno(), 1 << 16)
                        if not written:
                            ready.unregister(stream)
                        self._keep(written, screen)

    def text(self) -> str:
        """Returns the end of the child's output."""
        return bytes(self._end).decode("utf-8", "replace")

    def close(self, told: Ending) -> None:
        """Writes the child's ending to the log and, if it is news, to the terminal."""
        if self._log is None:  # the child ended before it knew its number
            self._told.show(bytes(self._end))
        if told.message:
            line = f"{told.message}\n".encode()
            self._write(line)
            if told.is_news:
                self._told.show(line)
        if self._log is not None:
            self._log.flush()
            if lost := self._log.dropped:
                reason = self._log.reason
                self._tell(f"the last {lost:,} bytes of {self._log_file} are lost: {reason}")
            self._send_log()

    def _hear(self) -> bool:
        """Reads reports from the child; False after the last."""
        try:
            heard = self._connection.recv(4096)
        except OSError:  # the child has ended
            return False
        *lines, self._facts = (self._facts + heard).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(heard)

    def _take(self, fact: dict[str, Any]) -> None:
        self.joined, self.connected = fact["joined"], fact["connected"]
        if self.process is not None:
            return
        self.process = fact["process"]
        file, self._send_log = _log_of(self._workdir, self.process, self._tell)
        self._log_file, self._log = file, LossyStream(lambda: _opened(file))
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        header = (
            f"=== process {self.process} of {fact['processes']} on {socket.gethostname()}, {now}\n"
        )
        self._write(header.encode())
        earlier = bytes(self._end)
        self._end.clear()
        self._keep(earlier, self._told)

    def _keep(self, written: bytes, screen: "_Screen") -> None:
        self._end += written
        del self._end[:-KEPT_BYTES]
        self._write(written)
        if self.process == 0:
            screen.show(written)

    def _tell(self, text: str) -> None:
        self._told.show(f"{text}\n".encode())

    def _write(self, written: bytes) -> None:
        if self._log is not None:
            self._log.write(written)


def _log_of(
    workdir: Path, process: int, tell: Callable[[str], None]
) -> tuple[Path, Callable[[], None]]:
    """Returns the log file of `process`, and a function that uploads the rest of it to a bucket.

    On a disk, each start appends to the same log. Objects in a bucket cannot be appended to, and a
    process may move to another machine at the next start. So each start of each process has its own
    folder in the bucket.

    Args:
      tell: called with a message if lines cannot be uploaded.
    """
    name, url = f"process_{process:05}.log", url_of(workdir)
    if url is None:
        return workdir / LOGS / name, lambda: None
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = f"{LOGS}/{now}-{socket.gethostname()}-{os.getpid()}"
    mirror = Mirror(workdir / folder, BucketStore(url.below(folder)), tell=tell)

    def send() -> None:
        try:
            mirror.close()
        except OSError as error:
            tell(f"WARNING: the last of {url}/{folder}/{name} is not there: {error}")

    return workdir / folder / name, send


def _opened(log: Path) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


class _Screen:
    """Shows UTF-8 text from chunks of bytes, which may end within a character."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def show(self, written: bytes) -> None:
        text = self._decoder.decode(written)
        # A chunk may begin anywhere, so a redrawn progress bar cannot be recognised.
        self._stream.write(shown(text) if self._stream.isatty() else text)
        self._stream.flush()
