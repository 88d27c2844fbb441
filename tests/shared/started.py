"""Processes that are started, watched and ended; each writes its output to a file."""

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked_processes import ForkedProcess, fresh_process

SECONDS = 400.0  # that anything may take
POLL_SECONDS = 0.002
HEARTBEAT_SECONDS = 10  # of several processes


class HangError(Exception):
    """Something that was waited for did not come in time."""


class Started:
    """The running processes by number, and the file with the output of each."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.running: dict[int, ForkedProcess | subprocess.Popen[bytes]] = {}
        self._began = time.monotonic()

    def start(self, number: int, *arguments: str, fresh: bool = False, **settings: Any) -> None:
        """Starts `python ARGUMENTS`; `fresh` as `fresh_process` does."""
        with self.files[number].open("wb") as file:
            self.running[number] = (fresh_process if fresh else ForkedProcess)(
                *arguments, stdout=file, stderr=file, **settings
            )

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self._began

    @property
    def ended(self) -> bool:
        """True if one of the processes has ended."""
        return any(process.poll() is not None for process in self.running.values())

    def output(self, process: int = 0) -> str:
        """Returns all that a process has written so far."""
        return self.files[process].read_text(errors="replace")

    def everything(self) -> str:
        """Returns the output of all."""
        return "\n".join(f"--- {file.name}\n{self.output(n)}" for n, file in enumerate(self.files))

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Returns whether `condition` came to hold before a process ended.

        Raises HangError after `SECONDS`, when all have been killed.
        """
        limit = time.monotonic() + SECONDS
        while not condition():
            if self.ended:
                return condition()
            self._pause(limit)
        return True

    def reach(self, condition: Callable[[], bool], what: str) -> None:
        """Waits as `wait_until`; fails if a process ends before `what`."""
        assert self.wait_until(condition), f"ended before {what!r}\n{self.everything()}"

    def wait_for(self, text: str) -> None:
        """Returns once `text` is in the output of process 0."""
        self.reach(lambda: text in self.output(), text)

    def exit_codes(self, seconds: float = SECONDS) -> list[int]:
        """Returns the exit codes once all have ended; raises HangError as `wait_until`."""
        limit = time.monotonic() + seconds
        while any(process.poll() is None for process in self.running.values()):
            self._pause(limit)
        return [process.wait() for process in self.running.values()]

    def send(self, number: int, process: int = 0) -> None:
        self.running[process].send_signal(number)

    def kill(self) -> None:
        """Ends all with SIGKILL."""
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()

    def _pause(self, limit: float) -> None:
        if time.monotonic() > limit:
            self.kill()
            raise HangError(f"this did not end in its time:\n{self.everything()[-3000:]}")
        time.sleep(POLL_SECONDS)


def free_address() -> str:
    """Returns an address of this machine with a free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def flags_of(address: str, count: int, process: int) -> list[str]:
    """Returns the flags of one of several processes of a run."""
    return [
        f"--coordinator={address}",
        f"--num_processes={count}",
        f"--process_id={process}",
        f"--heartbeat_seconds={HEARTBEAT_SECONDS}",
    ]
