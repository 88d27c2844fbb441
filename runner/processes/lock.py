"""Locks a workdir, so that one run at a time writes to it. Process 0 holds the lock.

The lock is a small JSON record: the file `workdir/lock` on a disk, or the object `lease/owner.json`
in a bucket. Its owner rewrites it every ten seconds. A process that sees no change for a minute, by
its own clock, takes the lock over. Where the kernel supports `flock`, a lock ends with its process,
and other processes of the machine don't have to wait.

A user may delete the file, and an owner may be suspended for an hour. So the owner checks that the
record is still its own immediately before it writes anything else.
"""

import abc
import contextlib
import datetime
import errno
import fcntl
import getpass
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from lmlib.storage.bucket.copies import LEASE, START_FILES, copies_folder
from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.bucket.owned import OwnedObject, TakenOverError
from lmlib.storage.bucket.store import BucketStore, Found, Patience
from lmlib.storage.failures import storage_failure
from lmlib.storage.stored_json import parse_json
from runner.errors import ConfigError, WorkdirLost, error_text

FILE_NAME = "lock"
RENEW_SECONDS = 10.0
ABANDONED_SECONDS = 60.0


class WorkdirLock:
    """Base class of workdir locks. It locks nothing itself, for processes that don't write.

    with FolderLock(workdir) as lock:
        lock.check()  # before each write

    Attributes:
      start: a random id of this start, for the files that it owns; empty if nothing is locked.
    """

    start = ""

    def check(self) -> None:
        """Raises WorkdirLost if this run has lost the lock; the message says how. Thread-safe."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Releases the lock. Raises WorkdirLost instead of any other error if the lock is lost."""


class _Lease(WorkdirLock):
    """A lock that a thread renews until the end of the `with` block."""

    _machine: str  # boot id, and the device or folder that kernel locks cover; empty without them
    _renewed_at: float

    def __init__(self, place: object, abandoned_seconds: float):
        self._place, self._limit = place, abandoned_seconds
        self._mutex, self._closed = threading.Lock(), threading.Event()
        self._lost = ""  # describes how this run lost the lock
        self.start, self._user = secrets.token_hex(8), _user()

    @abc.abstractmethod
    def _verify(self) -> None:
        """Sets `_lost` if the record is not this run's any more."""

    @abc.abstractmethod
    def _renew(self) -> None:
        """Rewrites the record if it is still this run's, or sets `_lost`."""

    @abc.abstractmethod
    def _give_back(self) -> None:
        """Releases a lock that is not lost."""

    def check(self) -> None:
        if not (self._closed.is_set() or self._lost):
            self._verify()
        if self._lost:
            raise WorkdirLost(self._lost)

    def __exit__(self, *exception: object) -> None:
        try:
            self.check()
        finally:
            with self._mutex:
                self._closed.set()
                if not self._lost:
                    with contextlib.suppress(OSError):
                        self._give_back()

    def _start_renewals(self) -> None:
        threading.Thread(target=self._keep, name="lock", daemon=True).start()

    def _keep(self) -> None:
        seconds = min(RENEW_SECONDS, self._limit / 6 or RENEW_SECONDS)
        while not (self._closed.wait(seconds) or self._lost):
            with self._mutex:
                if not self._closed.is_set():
                    self._renew()

    def _record(self, **more: Any) -> dict[str, Any]:
        renewed = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        own = {"user": self._user, "start": self.start, "machine": self._machine}
        return {**own, **more, "renewed": renewed}

    def _silent(self) -> float:
        return _clock() - self._renewed_at

    def _lose(self, other: dict[str, Any], why: str) -> None:
        # The kernel's lock excludes other processes of this machine even without renewals.
        kept_out = self._machine and other.get("machine") == self._machine
        if self._silent() >= self._limit and not kept_out:
            why = f"this process did not renew the lock for {self._silent():.0f} s"
        who = f"{other['user']} has" if other else "another run may have"
        self._lost = (
            f"{who} taken over {self._place}, since {why}: this process ends, and writes nothing "
            "more. The same command resumes from the newest checkpoint"
        )


class FolderLock(_Lease):
    """Locks a folder on a disk."""

    def __init__(self, workdir: Path, abandoned_seconds: float = ABANDONED_SECONDS):
        """Takes the lock; creates the folder if necessary.

        Args:
          abandoned_seconds: seconds without renewal after which a lock of another host is taken
            over.

        Raises:
          ConfigError: if another run is active there (the message names its user), or the folder
            cannot be written.
        """
        super().__init__(workdir, abandoned_seconds)
        self._file = workdir / FILE_NAME
        self._made: list[Path] = []
        try:
            self._made = [each for each in (workdir, *workdir.parents) if not each.exists()]
            taken = False
            while not taken:
                wait_for_lock(workdir, abandoned_seconds=abandoned_seconds)
                workdir.mkdir(parents=True, exist_ok=True)
                taken = self._take()
        except (OSError, ConfigError) as error:
            self._remove_made()
            if isinstance(error, ConfigError):
                raise
            told = storage_failure(f"write {self._file}", workdir, error.errno or errno.EIO)
            raise ConfigError(error_text(told)) from error
        self._start_renewals()

    def __exit__(self, *exception: object) -> None:
        try:
            super().__exit__()
        finally:
            os.close(self._descriptor)
            if not self._lost:  # another run may own the folders otherwise
                self._remove_made()

    def _take(self) -> bool:
        """Opens and locks the file and writes the record; False if another process was faster."""
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        locked = _flock(descriptor, fcntl.LOCK_EX)
        # The file of a dead run may have been deleted and recreated in the meantime.
        faster = locked is False or not _is_at(descriptor, self._file)
        if faster or _held_at(descriptor, locked).lives is not False:
            os.close(descriptor)
            return False
        self._machine = _machine_of(descriptor) if locked else ""
        self._descriptor = descriptor
        self._write()
        return True

    def _renew(self) -> None:
        self._verify()
        if not self._lost:
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        """Writes the record. Its length is constant, so readers never see half old, half new."""
        began = _clock()  # taken first, since the write may be slow
        content = json.dumps(self._record(), indent=1).encode() + b"\n"
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))
        os.fsync(self._descriptor)
        self._renewed_at = began

    def _verify(self) -> None:
        """Reads the file; ignores read errors, since the next read may succeed."""
        try:
            owner = _parsed(self._file.read_bytes())
            same_file = _is_at(self._descriptor, self._file)
        except (FileNotFoundError, NotADirectoryError):
            owner, same_file = {}, False
        except OSError:
            return
        other = {} if owner.get("start") == self.start else owner
        if same_file and not other:
            return
        if self._file.parent.is_dir():
            self._lose(other, f"{self._file} was deleted")
        else:
            self._lost = (
                f"{self._place} was deleted or moved during the run: this process ends, and writes "
                "nothing more. If it was moved, give the same command its new path as --workdir"
            )

    def _give_back(self) -> None:
        self._file.unlink()

    def _remove_made(self) -> None:
        """Removes the folders that were created for the lock if they are empty."""
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()


class BucketLock(_Lease):
    """Locks a folder in a bucket.

    Writes are conditional: the server accepts a write only if the object is unchanged since the
    writer last saw it. So only one of two competing owners succeeds.

    Attributes:
      files: the id of the start whose folder holds the run's small files; this start's after
        `publish`.
    """

    def __init__(self, store: BucketStore, abandoned_seconds: float = ABANDONED_SECONDS):
        """Takes the lease. This process must already own the local copy that it writes to.

        Raises:
          ConfigError: if another run is active there; the message names its user.
          BucketError: if the bucket cannot be read or written, or the lease's object is missing.
        """
        super().__init__(store.url, abandoned_seconds)
        # A kernel lock admits one writer per machine and folder of copies, so an owner with the
        # same machine and folder is dead.
        self._machine = f"{_kernel()} {copies_folder()}"
        self._object = OwnedObject(store, LEASE, self.start)
        taken = False
        while not taken:
            found = _wait(self._place, self._look, 0.0, self._limit).found
            self.files = self._files_of(found)
            # Taken before the write: other processes may see the record from this moment.
            self._renewed_at = _clock()
            taken = self._object.take(self._record(files=self.files, ended=False), found)
        # Slower renewals are useless, and `check` would wait for them.
        soon = Patience(answer=self._limit / 10, total=self._limit / 10)
        self._object.store = BucketStore(store.url, soon)
        self._start_renewals()

    def publish(self) -> None:
        """Makes the lease point to this start's folder for the run's small files."""
        while self.files != self.start:
            self.check()
            with self._mutex:
                self._renew(self.start)

    def _look(self) -> "_Held":
        found = self._object.found()
        owner = _parsed(found.content)
        dead = not owner or owner.get("ended") or owner.get("machine") == self._machine
        return _Held(found, False if dead else None)

    def _files_of(self, found: Found) -> str:
        """Returns the start that the lease names; this start if the folder is empty."""
        if isinstance(files := _parsed(found.content).get("files"), str):
            return files
        if self._object.store.list(START_FILES):
            raise BucketError(
                errno.EIO,
                f"cannot read {self._place}/{LEASE}: it is missing or damaged, and only it leads "
                f"to the files in {self._place}/{START_FILES}: restore it, or delete them",
            )
        return self.start

    def _verify(self) -> None:
        if self._silent() >= self._limit:  # another run may have taken it
            with self._mutex:
                if not self._closed.is_set():
                    self._renew()

    def _renew(self, files: str = "") -> None:
        """Renews the lease. Errors are ignored until the lease expires; the next try may work."""
        began, files = _clock(), files or self.files
        if self._lost:
            return
        try:
            self._object.write(self._record(files=files, ended=False))
            # The time before the write, since others may have seen the record since then.
            self._renewed_at, self.files = began, files
        except TakenOverError as error:
            self._lose(_parsed(error.content), f"{LEASE} was deleted or replaced")
        except OSError:
            if self._silent() >= self._limit:
                self._lose({}, "")

    def _give_back(self) -> None:
        self._object.write(self._record(files=self.files, ended=True))


class _Held(NamedTuple):
    """A lock record that was read."""

    found: Found
    lives: bool | None  # False without an owner or lock; `None` if only time can tell


def wait_for_lock(
    workdir: Path, seconds: float = 0.0, abandoned_seconds: float = ABANDONED_SECONDS
) -> None:
    """Waits until no run is active in `workdir`; removes only the lock of a dead run.

    Args:
      seconds: how long to wait for a run to end.
      abandoned_seconds: how long to watch the lock of another host, whose owner cannot be checked.

    Raises:
      ConfigError: if a run is still active; the message names its user.
    """
    file = workdir / FILE_NAME

    def look() -> _Held:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return _Held(Found(None, b""), False)
        try:
            return _held_at(descriptor, _flock(descriptor, fcntl.LOCK_SH))
        finally:
            os.close(descriptor)

    while (held := _wait(workdir, look, seconds, abandoned_seconds)).lives is None:
        # The file is removed rather than rewritten: if its owner wakes up, its writes then go to
        # a deleted file.
        with contextlib.suppress(FileNotFoundError):
            if file.read_bytes() == held.found.content:
                file.unlink()


def _wait(place: object, look: Callable[[], _Held], seconds: float, limit: float) -> _Held:
    """Waits until the lock's owner has ended, or did not renew it for `limit` seconds.

    Returns:
      The lock as it was read last.
    """
    begun = seen_at = time.monotonic()
    first: bytes | None = None
    seen: bytes | None = None
    while True:
        asked = time.monotonic()
        held = look()
        content, now = held.found.content, time.monotonic()
        if held.lives is False or content is None:
            return held
        if content != seen:
            seen, seen_at = content, now
        if held.lives is None and asked - seen_at >= limit:
            return held
        owner = _parsed(content)
        run = f"the run of {owner['user']}" if owner else "a run that has just started"
        lives = held.lives or (first is not None and content != first)
        if lives and now - begun >= seconds:
            raise ConfigError(
                f"{place} is in use by {run}: end that run or use another workdir, since only one "
                "run at a time can write there"
            )
        if first is None:
            first = content
            longest = max(seconds, 0.0 if lives else limit)
            told = f"{place} is locked by {run}: waiting for at most {longest:g} s"
            print(told, file=sys.stderr, flush=True)
        time.sleep(min(1.0, limit / 10))


def _held_at(descriptor: int, locked: bool | None) -> _Held:
    found = Found(os.pread(descriptor, 1 << 16, 0), b"")
    if locked is False:
        return _Held(found, True)
    owner = _parsed(found.content)
    here = locked and owner.get("machine") == _machine_of(descriptor)
    return _Held(found, False if here or not owner else None)


def _flock(descriptor: int, kind: int) -> bool | None:
    """True if the kernel granted the lock; `None` if locks are not supported."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _parsed(content: bytes | None) -> dict[str, Any]:
    """Returns the entries of a record; empty if it is absent or damaged."""
    with contextlib.suppress(ValueError):
        entries = parse_json(content or b"")
        if isinstance(entries, dict) and {"user", "start", "machine"} <= entries.keys():
            return entries
    return {}


def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # users have no names in some containers
        user = f"user {os.getuid()}"
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"{user} (pid {os.getpid()} on {socket.gethostname()}, since {since})"


def _machine_of(descriptor: int) -> str:
    return f"{_kernel()} {os.fstat(descriptor).st_dev}"


def _kernel() -> str:
    """Returns an id of the running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _clock() -> float:
    """Reads a clock that keeps running while the machine is suspended, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
