"""One run at a time in a bucket: process 0 holds a lease while its run lasts.

Who takes it makes `lease/<number>`, one more than the newest, by a conditional write: of several
one succeeds. Its owner writes the object anew every ten seconds. One that has not changed for a
minute, on the clock of the process that looks, is a dead run's, and the next number may be made; so
is one of this machine, where a lock of the kernel's says whether its owner lives. An owner that
finds a newer number, or could not write its own in time, has lost the lease.
"""

import contextlib
import getpass
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from lmlib.storage.bucket.copies import LEASE, copies_folder
from lmlib.storage.bucket.store import BucketStore, Patience, give_lease_back, hold_lease
from lmlib.storage.stored_json import parse_json
from runner.errors import ConfigError, WorkdirLost
from runner.processes.lock import ABANDONED_SECONDS, RENEW_SECONDS, kernel, seconds_awake_or_not


class Lease:
    """Holds the lease of a folder in a bucket while the block runs.

    with Lease(store) as lease:
        lease.check()  # before each write
    """

    def __init__(
        self,
        store: BucketStore,
        *,
        abandoned_seconds: float = ABANDONED_SECONDS,
        tell: Callable[[str], None] = print,
    ):
        """Takes the lease; the copy that this process writes into must be its own already.

        Raises:
          ConfigError: if another run goes on there, and whose.
          BucketError: if the bucket cannot be read or written.
        """
        self._store = BucketStore(store.url, leased=False)
        # A renewal that takes longer is of no use, and `check` waits for it.
        soon = Patience(answer=abandoned_seconds / 6, total=abandoned_seconds / 6)
        self._renewing = BucketStore(store.url, soon, leased=False)
        self._limit = abandoned_seconds
        self._closed, self._lost = threading.Event(), ""
        self._content = {
            "owner": f"{_user()} (pid {os.getpid()} on {socket.gethostname()})",
            "start": secrets.token_hex(8),
            "machine": _machine(),
        }
        number = None
        while number is None:
            number = self._taken(tell)
        self._name = f"{LEASE}/{number:08}"
        for older in self._store.list(LEASE):
            if older < self._name:
                self._store.delete(older)
        hold_lease(store.url, self._seconds)
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raises WorkdirLost, saying how, if the lease is this run's no more."""
        silent = seconds_awake_or_not() - self._renewed_at
        if not self._lost and silent >= self._limit:  # another may have taken it
            self._renew()
        if self._lost:
            raise WorkdirLost(self._lost)

    def _seconds(self) -> float:
        """For how long this process may write; raises as `check` does."""
        self.check()
        return max(0.0, self._limit - (seconds_awake_or_not() - self._renewed_at))

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        """Gives the lease back; a bucket that is not to be reached finds it abandoned."""
        self._closed.set()
        if not self._lost:  # else what other threads still try is held back
            give_lease_back(self._store.url)
            with contextlib.suppress(OSError):
                self._store.write(self._name, self._encoded(ended=True))

    def _taken(self, tell: Callable[[str], None]) -> int | None:
        """The number of this process's own object; `None` if another was faster."""
        newest = max(self._store.list(LEASE), default=None)
        if newest is None:
            number = 1
        else:
            self._wait_for(newest, tell)
            number = int(newest.removeprefix(f"{LEASE}/")) + 1
        self._renewed_at = seconds_awake_or_not()  # who watches may see it from now on
        took = self._store.write_if_absent(f"{LEASE}/{number:08}", self._encoded())
        return number if took else None

    def _wait_for(self, name: str, tell: Callable[[str], None]) -> None:
        """Returns when the owner of an object has ended, or is dead."""
        began, first = time.monotonic(), b""
        while True:
            try:
                content = self._store.read(name)
                held = parse_json(content)
                owner, machine, ended = held["owner"], held["machine"], held["ended"]
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                return
            if ended or machine == _machine() or time.monotonic() - began >= self._limit:
                return
            if first and content != first:
                raise ConfigError(
                    f"{self._store.url} is in use by the run of {owner}: one run at a time; end "
                    "that one or use another workdir"
                )
            if not first:
                first = content
                tell(
                    f"{self._store.url} is locked by the run of {owner}: waiting, for "
                    f"{self._limit:g} s at most"
                )
            time.sleep(min(1.0, self._limit / 10))

    def _keep(self) -> None:
        while not self._closed.wait(min(RENEW_SECONDS, self._limit / 6)):
            self._renew()
            if self._lost:
                return

    def _renew(self) -> None:
        """Where the bucket is not to be reached, the next try may succeed, until it is too late."""
        began = seconds_awake_or_not()
        silent = began - self._renewed_at
        with contextlib.suppress(OSError):
            newest = max(self._renewing.list(LEASE), default=None)
            if newest != self._name:
                self._lost = (
                    f"another run has taken over {self._store.url}, since nothing was heard of "
                    f"this process for {silent:.0f} s: it ends, and writes nothing more"
                )
            elif not self._closed.is_set():
                self._renewing.write(self._name, self._encoded())
                self._renewed_at = began  # not later: who watches has seen it since
                return
        if silent >= self._limit and not self._lost:
            self._lost = (
                f"{self._store.url} could not be reached for {silent:.0f} s, and another run may "
                "have taken it over: this process ends. The same command goes on from the newest "
                "checkpoint"
            )

    def _encoded(self, ended: bool = False) -> bytes:
        content = self._content | {
            "ended": ended,
            "renewed": time.time(),
            "is": secrets.token_hex(4),
        }
        return json.dumps(content, indent=1).encode()


def _machine() -> str:
    """Of processes that tell the same, the kernel lets one alone write into a copy."""
    return f"{kernel()} {copies_folder()}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # some containers have users without names
        return f"user {os.getuid()}"
