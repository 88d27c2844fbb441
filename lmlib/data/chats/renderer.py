"""Client of the process in which chat templates run: starts it and reports its failures."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

LARGEST_TEXT = 16 << 20  # characters that a template may write
LARGEST_ANSWER = 5 * LARGEST_TEXT  # bytes
OUT_OF_MEMORY = 77  # exit status of the process
_SECONDS_TO_END = 10.0
_PROCESS = "lmlib.data.chats.server"


class BeyondLimits(ValueError):
    """A template exceeded its memory or time limit."""


@dataclass(frozen=True)
class Limits:
    """The limits of a template for one text: megabytes (2^20 bytes) of memory, and CPU seconds.

    CPU time does not pass while the machine is busy with other work, or suspended.
    """

    megabytes: int = 512
    seconds: float = 5.0


class ChatRenderer:
    """A process that starts with the first question, and restarts if it has died.

    Threads take turns.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._end: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the result of `lmlib.data.chats.server.answer` for the question.

        Raises:
          BeyondLimits: if it takes too much; the message gives the limit.
          ValueError: if the question is not JSON-serialisable.
          OSError: if the process cannot be started; a ChildProcessError if it is killed.
        """
        message = to_bytes(question)
        with self._lock:
            process = self._running()
            try:
                self._connection.send_bytes(message)
                answer: dict[str, Any] = from_bytes(self._connection.recv_bytes(LARGEST_ANSWER))
                return answer
            except (EOFError, OSError):
                raise self._cause(process) from None
            except BaseException:  # Ctrl-C too: the rest must not be read as the next answer
                self._end()
                raise

    def _running(self) -> subprocess.Popen[bytes]:
        # A fork of this process gets its own child, since `poll` does not find this one.
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._connection, its_end = Pipe()
            limits = (str(self._limits.megabytes), str(self._limits.seconds))
            path = [*sys.path, str(Path(__file__).parents[3])]
            with its_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _PROCESS, str(its_end.fileno()), *limits],
                    pass_fds=[its_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                    start_new_session=True,  # Ctrl-C should reach only this process
                )
            self._end = weakref.finalize(self, _end, self._process, self._connection)
        return self._process

    def _cause(self, process: subprocess.Popen[bytes]) -> Exception:
        """Returns the reason why a process no longer answers."""
        self._connection.close()
        try:
            status = process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status == OUT_OF_MEMORY:
            return BeyondLimits(f"{self._limits.megabytes} MB of memory")
        if status == -signal.SIGPROF:
            return BeyondLimits(f"{self._limits.seconds:g} seconds of processor time")
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        return ChildProcessError(
            f"the process in which chat templates run ended with {how}, perhaps for want of "
            "memory: free some, or use another template if it happens again"
        )


def to_bytes(value: Any) -> bytes:
    """Encodes a value as JSON; its texts may have lone surrogates. Raises ValueError on failure."""
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat holds what is no JSON: {error}") from error


def from_bytes(message: bytes) -> Any:
    """The inverse of `to_bytes`."""
    return json.loads(message.decode("utf-8", "surrogatepass"))


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        connection.close()
