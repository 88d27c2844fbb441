"""Asks the process in which chat templates run, and reports how it failed. For `ChatTemplate`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = 77  # exit status of the process


class BeyondLimits(ValueError):
    """A template exceeded its memory or time limit."""


class ChatRenderer:
    """A process that starts with the first question, and restarts if it has died.

    Threads take turns. One question may use `megabytes` (2^20 bytes) of memory and `seconds` of CPU
    time, which does not pass while the machine does other work.
    """

    def __init__(self, megabytes: int = 512, seconds: float = 5.0) -> None:
        self._megabytes, self._seconds = megabytes, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the result of `lmlib.data.chats.server.answer` for the question.

        Raises:
          BeyondLimits: if it takes too much.
          ValueError: if the question is not JSON-serialisable.
          OSError: if the process cannot be started; a ChildProcessError if it is killed.
        """
        try:
            line = to_line(question)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the chat contains a value that is not JSON: {error}") from error
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # Ctrl-C too: the rest must not be read as the next answer
                _end(process)
                raise
            if answer:
                return from_line(answer)
            status = process.wait()
        limits = {
            OUT_OF_MEMORY: f"{self._megabytes} MB of memory",
            -signal.SIGPROF: f"{self._seconds:g} seconds of processor time",
        }
        if status in limits:
            raise BeyondLimits(
                f"the chat template takes more than {limits[status]}: use another template, or "
                "leave this conversation out"
            )
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        raise ChildProcessError(
            f"the process in which chat templates run ended with {how}, perhaps for lack of "
            "memory: free some, or use another template if it happens again"
        )

    def _running(self) -> subprocess.Popen[bytes]:
        # `poll` does not find the process after a fork: the fork starts its own.
        if self._process is None or self._process.poll() is not None:
            server = [sys.executable, "-P", "-m", "lmlib.data.chats.server"]
            path = [*sys.path, str(Path(__file__).parents[3])]
            self._process = subprocess.Popen(
                [*server, str(self._megabytes), str(self._seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,  # Ctrl-C should reach only this process
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def to_line(value: Any) -> bytes:
    """Encodes a value as a line of JSON; its texts may have lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def from_line(line: bytes) -> Any:
    """The inverse of `to_line`."""
    return json.loads(line.decode("utf-8", "surrogatepass"))


def _end(process: Any) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # unsent bytes cannot be flushed
            pipe.close()
