"""One run at a time in a bucket: process 0 holds a lease while its run lasts.

The lease is one object, `lease/owner.json`, which each write changes, and which is only written
while it is as the writer last saw it: of two that write, one succeeds. Its owner writes it anew
every ten seconds. Who finds that it has not changed for a minute, on its own clock, takes it over
by writing it; so does at once who is on the same machine, where a lock of the kernel's says whether
the owner lives. An owner that finds it written by another, or could not write it in time, has lost
the lease.
"""

import contextlib
import getpass
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from lmlib.storage.bucket.copies import LEASE, copies_folder
from lmlib.storage.bucket.owned import OwnedObject, TakenOverError
from lmlib.storage.bucket.store import BucketStore, Found, Patience
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
        self._url, self._limit = store.url, abandoned_seconds
        self._closed, self._lost = threading.Event(), ""
        self._mutex = threading.Lock()  # of the object
        self._machine = f"{kernel()} {copies_folder()}"
        self._object = OwnedObject(store, f"{LEASE}/owner.json")
        while not self._taken(tell):
            pass
        # A renewal that takes longer is of no use, and `check` waits for it.
        soon = Patience(answer=abandoned_seconds / 10, total=abandoned_seconds / 10)
        self._object.store = BucketStore(store.url, soon)
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raises WorkdirLost, saying how, if the lease is this run's no more."""
        silent = seconds_awake_or_not() - self._renewed_at
        if not self._lost and silent >= self._limit:  # another may have taken it
            self._renew()
        if self._lost:
            raise WorkdirLost(self._lost)

    def seconds(self) -> float:
        """For how long this process may write; raises as `check` does."""
        self.check()
        return max(0.0, self._limit - (seconds_awake_or_not() - self._renewed_at))

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        """Gives the lease back; a bucket that is not to be reached finds it abandoned."""
        self._closed.set()
        with self._mutex, contextlib.suppress(OSError):
            if not self._lost:
                self._object.write(self._content(ended=True))

    def _taken(self, tell: Callable[[str], None]) -> bool:
        """Waits until the lease is free, then takes it; false if another was faster."""
        free = self._free(tell)
        self._renewed_at = seconds_awake_or_not()  # who watches may see it from now on
        return self._object.take(self._content(), free)

    def _free(self, tell: Callable[[str], None]) -> Found:
        """The object of an owner that has ended, or is dead."""
        first, began = None, time.monotonic()
        while True:
            unchanged = time.monotonic() - began
            found = self._object.found()
            try:
                held = parse_json(found.content or b"")
                user, machine, ended = held["user"], held["machine"], held["ended"]
            except (ValueError, KeyError, TypeError):
                return found
            abandoned = found == first and unchanged >= self._limit
            if ended or machine == self._machine or abandoned:
                return found
            if first is None:
                first, began = found, time.monotonic()
                tell(
                    f"{self._url} is locked by the run of {user}: waiting, for "
                    f"{self._limit:g} s at most"
                )
            elif found != first:
                raise ConfigError(
                    f"{self._url} is in use by the run of {user}: one run at a time; end "
                    "that one or use another workdir"
                )
            time.sleep(min(1.0, self._limit / 10))

    def _keep(self) -> None:
        while not self._closed.wait(min(RENEW_SECONDS, self._limit / 6)):
            self._renew()
            if self._lost:
                return

    def _renew(self) -> None:
        """Where the bucket is not to be reached, the next try may succeed, until it is too late."""
        with self._mutex:
            began = seconds_awake_or_not()
            silent = began - self._renewed_at
            if self._closed.is_set() or self._lost:
                return
            try:
                self._object.write(self._content())
                self._renewed_at = began  # not later: who watches has seen it since
            except TakenOverError:
                self._lost = (
                    f"another run has taken over {self._url}, since nothing was heard of "
                    f"this process for {silent:.0f} s: it ends, and writes nothing more"
                )
            except OSError:
                if silent >= self._limit:
                    self._lost = (
                        f"{self._url} could not be reached for {silent:.0f} s, and another run may "
                        "have taken it over: this process ends. The same command goes on from the "
                        "newest checkpoint"
                    )

    def _content(self, ended: bool = False) -> dict[str, Any]:
        return {
            "user": f"{_user()} (pid {os.getpid()} on {socket.gethostname()})",
            # The kernel lets one process at a time of a machine and folder write into a copy.
            "machine": self._machine,
            "ended": ended,
            "renewed": time.time(),
        }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # some containers have users without names
        return f"user {os.getuid()}"
