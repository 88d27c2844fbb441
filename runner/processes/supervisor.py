"""Supervises each process of a run with several processes.

When a process of the run dies, JAX aborts the others, and their Python code cannot report why. So
each process is the child of a supervisor, which stores the process's output in workdir/logs, and
searches it for the process that stopped responding.
"""

import codecs
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
from typing import Any, TextIO

from lmlib.storage.bucket.copies import LOGS, url_of
from lmlib.storage.bucket.mirror import Mirror
from lmlib.storage.bucket.store import BucketStore
from lmlib.terminal.text import shown
from runner.command_line.exit_status import SIGNALLED
from runner.command_line.lossy_stream import LossyStream
from runner.processes.endings import Ending, ending
from runner.processes.parent import Parent
from runner.processes.stopping import StopSignals

FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
KEPT_BYTES = 1 << 18  # the end of the output, which is searched for the reason
LAST_WORDS_SECONDS = 5.0  # wait for output if children of a dead child keep it open


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
    parent = Parent(supervises=True)
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=parent.environment,
        pass_fds=parent.pass_fds,
        start_new_session=True,  # the child gets signals only from this process
    )
    parent.of_child.close()
    for each in FORWARDED:
        signal.signal(each, lambda number, frame: child.send_signal(number))
    ended: list[Ending] = []

    def end(number: signal.Signals, reason: str) -> None:
        ended.append(Ending(SIGNALLED + number, f"error: ended by {number.name}: {reason}"))
        child.kill()

    StopSignals(grace_seconds, lambda number: child.send_signal(signal.SIGTERM), end)
    output = _Output(workdir, child, parent.connection)
    output.start()
    returncode = child.wait()
    output.join(LAST_WORDS_SECONDS)
    if not ended:
        text, limits = (
            bytes(output.end).decode("utf-8", "replace"),
            (heartbeat_seconds, startup_seconds),
        )
        ended = [ending(returncode, text, output.process, output.connected, *limits)]
    output.close(ended[0])
    return ended[0].exit_code


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


class _Output(threading.Thread):
    """Reads the child's output and its reports over the connection.

    It continues if the log or the terminal fails, since the child would block otherwise.

    Attributes:
      process: the child's number; `None` until it has reported it.
      connected: True if JAX has connected the child to the other processes.
      end: the end of the output.
    """

    def __init__(self, workdir: Path, child: subprocess.Popen[bytes], connection: socket.socket):
        super().__init__(name="output", daemon=True)
        self.process: int | None = None
        self.connected = False
        self.end = bytearray()
        self._workdir, self._connection, self._facts = workdir, connection, b""
        self._stderr = _Screen(sys.stderr)
        self._screens: dict[Any, _Screen] = {
            child.stdout: _Screen(sys.stdout),
            child.stderr: self._stderr,
        }
        self._log: LossyStream | None = None
        self._log_file = workdir
        self._send_log: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Reads until the child, and all processes that it started, have closed the output."""
        with selectors.DefaultSelector() as ready:
            for each in (self._connection, *self._screens):
                ready.register(each, selectors.EVENT_READ)
            while ready.get_map():
                found = [key.fileobj for key, _ in ready.select()]
                # The connection comes first: it tells which log the output belongs to.
                if self._connection in found and not self._hear():
                    ready.unregister(self._connection)
                for stream, screen in self._screens.items():
                    if stream in found:
                        written = os.read(stream.fileno(), 1 << 16)
                        if not written:
                            ready.unregister(stream)
                        self._keep(written, screen)

    def close(self, told: Ending) -> None:
        """Writes the child's ending to the log and, if it is news, to the terminal."""
        if self._log is None:  # the child ended before it knew its number
            self._stderr.show(bytes(self.end))
        if told.message:
            line = f"{told.message}\n".encode()
            self._write(line)
            if told.is_news:
                self._stderr.show(line)
        if self._log is not None:
            self._log.flush()
            if lost := self._log.dropped:
                reason = self._log.reason
                self._tell(f"the last {lost:,} bytes of {self._log_file} are lost: {reason}")
            try:
                self._send_log()
            except OSError as error:
                self._tell(f"WARNING: the end of {self._log_file.name} is not uploaded: {error}")

    def _hear(self) -> bool:
        """Reads reports from the child; False after the last."""
        try:
            heard = self._connection.recv(4096)
        except OSError:  # the child has ended
            return False
        *lines, self._facts = (self._facts + heard).split(b"\n")
        for line in lines:
            fact = json.loads(line)
            self.connected = fact["connected"]
            if self.process is None:
                self.process = fact["process"]
                self._open_log(fact["processes"])
        return bool(heard)

    def _open_log(self, processes: int) -> None:
        """Opens the child's log, and writes the output so far into it.

        On a disk, each start appends to the same log. Objects in a bucket cannot be appended to,
        and a process may move to another machine at the next start. So each start of each process
        has its own folder in the bucket.
        """
        url, folder = url_of(self._workdir), self._workdir / LOGS
        if url is not None:
            now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
            start = f"{LOGS}/{now}-{socket.gethostname()}-{os.getpid()}"
            folder, store = self._workdir / start, BucketStore(url.below(start))
            self._send_log = Mirror(folder, store, tell=self._tell).close
        self._log_file = folder / f"process_{self.process:05}.log"
        self._log = LossyStream(self._opened)
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        place = f"process {self.process} of {processes} on {socket.gethostname()}"
        self._write(f"=== {place}, {now}\n".encode())
        earlier = bytes(self.end)
        self.end.clear()
        self._keep(earlier, self._stderr)

    def _opened(self) -> int:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def _keep(self, written: bytes, screen: _Screen) -> None:
        self.end += written
        del self.end[:-KEPT_BYTES]
        self._write(written)
        if self.process == 0:
            screen.show(written)

    def _tell(self, text: str) -> None:
        self._stderr.show(f"{text}\n".encode())

    def _write(self, written: bytes) -> None:
        if self._log is not None:
            self._log.write(written)
