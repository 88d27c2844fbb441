"""Asks the process in which chat templates run: starts it, and tells what it died of."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmlib.data.chats.protocol import END, LARGEST_ANSWER, OUT_OF_MEMORY, read_message

_PROCESS = "lmlib.data.chats.server"


@dataclass(frozen=True)
class Limits:
    """What a template may take for one text: MB (2^20 bytes) of memory, and seconds of processor
    time, which do not pass while this machine does something else, or is suspended."""

    megabytes: int = 512
    seconds: float = 5.0


class Answers(NamedTuple):
    """To a question, see `chat_protocol`: the series that are complete; and what of one that is not
    was too much, as "5 seconds of processor time", or None."""

    series: list[list[tuple[Any, str]]]
    too_much: str | None


class ChatRenderer:
    """A process that is started with the first question, and again with the next one after it has
    died. Threads take turns."""

    def __init__(self, limits: Limits = Limits()) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()

    def ask(self, question: bytes, chats: int) -> Answers:
        """The answers to the messages of a question with so many chats.

        Raises OSError if the process cannot be started, or as ChildProcessError if it is killed.
        """
        series: list[list[tuple[Any, str]]] = []
        with self._lock:
            process = self._running()
            questions, answers = process.stdin, process.stdout
            assert questions is not None and answers is not None
            try:
                questions.write(question)
                questions.flush()
                while len(series) <= chats and not any(series[:1]):
                    series.append([*iter(lambda: read_message(answers.read, LARGEST_ANSWER), END)])
                return Answers(series, None)
            except (EOFError, BrokenPipeError):
                return Answers(series, self._too_much(process.wait()))
            except BaseException:  # Ctrl-C too: the rest must not be taken for the next answers
                self._end()
                raise

    def _running(self) -> subprocess.Popen[bytes]:
        # In a fork of this process, `poll` finds no such child: it gets one of its own.
        if self._process is None or self._process.poll() is not None:
            self._end()
            limits = (str(self._limits.megabytes), str(self._limits.seconds))
            path = [*sys.path, str(Path(__file__).parents[2])]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROCESS, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,  # Ctrl-C is for this process
            )
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _too_much(self, status: int) -> str:
        if status == OUT_OF_MEMORY:
            return f"{self._limits.megabytes} MB of memory"
        if status == -signal.SIGPROF:
            return f"{self._limits.seconds:g} seconds of processor time"
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        raise ChildProcessError(
            f"the process in which chat templates run ended with {how}, perhaps for want of "
            "memory: free some, or use another template if it happens again"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # of what is left to be written
            if stream is not None:
                stream.close()
