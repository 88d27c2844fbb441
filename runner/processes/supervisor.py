"""In a run of several processes, each is the child of a supervisor that watches it.

When a process of the run dies, JAX aborts the others, and Python code in them cannot say why. Their
supervisors can: they keep the output of each process in workdir/logs, and find there which process
was missed.
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
KEPT_BYTES = 1 << 18  # of the end of the output, to look for the reason in
LAST_WORDS_SECONDS = 5.0  # for output that a dead child's own children still hold open
_VARIABLE = "RUNNER_SUPERVISOR"  # the environment's name for the child's end of the connection


@dataclasses.dataclass
class Connection:
    """The supervised process's connection to its supervisor."""

    _socket: socket.socket

    @staticmethod
    def inherited() -> "Connection | None":
        """The connection of this process; `None` if no supervisor started it.

        From now on this process ends when its supervisor does, however that ends.
        """
        # Taken out: it is not for the processes that this one starts.
        descriptor = os.environ.pop(_VARIABLE, None)
        if descriptor is None:
            return None
        connection = Connection(socket.socket(fileno=int(descriptor)))
        connection._socket.set_inheritable(False)
        given = (connection._socket,)
        threading.Thread(target=end_after, args=given, name="supervised", daemon=True).start()
        return connection

    def tell(self, process: int, processes: int, *, joined: bool, connected: bool = False) -> None:
        """Tells this process's number, the number of all, if it has found the others, and if JAX
        has connected it to them."""
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
    """Runs this command again as a child, to its end; returns the exit code for this process.

    The child's stdout and stderr are appended to its log. The output of process 0 is shown too, and
    every process's reason to end early. SIGTERM and SIGINT reach the child as SIGTERM, on
    which it stops; if it takes longer than `grace_seconds`, it is killed. The other limits are only
    for the messages.
    """
    ours, its = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, _VARIABLE: str(its.fileno())},
        pass_fds=[its.fileno()],
        start_new_session=True,  # signals reach it once, from here
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
    """Keeps the output of the child, and its reports over the connection.

    It goes on if the log or the terminal fails: the child would wait for it.
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
        """Until the child, and every process that it has left behind, has closed its output."""
        with selectors.DefaultSelector() as ready:
            # First the connection: it says where the rest belongs.
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
        """The end of the child's output."""
        return bytes(self._end).decode("utf-8", "replace")

    def close(self, told: Ending) -> None:
        """Writes how it ended into the log and, if that is news, to the terminal."""
        if self._log is None:  # it ended before it knew its number, and has no log
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
        """Takes in reports of the child; returns if there may be more."""
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
    """The log of `process`, and a function that sends the last of it to its bucket.

    On a disk each start appends to the same log. In a bucket nothing is appended to, and a process
    may be on another machine at the next start: each start of each process has a folder there.

    Args:
      tell: is told of lines that cannot be sent.
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
    """Shows UTF-8 text that comes in pieces, which may end within a character."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def show(self, written: bytes) -> None:
        text = self._decoder.decode(written)
        # A piece may begin anywhere: a bar that is redrawn cannot be told from a text.
        self._stream.write(shown(text) if self._stream.isatty() else text)
        self._stream.flush()
