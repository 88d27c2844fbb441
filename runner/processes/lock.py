"""One run at a time in a workdir: process 0 holds `workdir/lock` while its run lasts.

The kernel locks the file (`flock`), and unlocks it however its owner ends. Where that lock does not
reach, on another host say, the file's content does: the owner renews it every ten seconds, and what
has not changed for a minute, on the clock of the process that looks, is a dead run's.

A file can be deleted, by whoever takes it for a leftover. So the owner looks before it writes
anything: the file must be the one that it made, and hold what it wrote.
"""

import contextlib
import dataclasses
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
from typing import Any

from lmlib.storage.failures import storage_failure
from lmlib.storage.stored_json import parse_json
from runner.errors import ConfigError, WorkdirLost, in_words

FILE_NAME = "lock"
RENEW_SECONDS = 10.0
ABANDONED_SECONDS = 60.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who holds a lock.

    Attributes:
      since: when the run was started.
      start: a random text, another one for each start.
      kernel: which kernel it runs on, from one boot to the next.
      device: the number that this kernel has given to the file system.
      locked: whether the file system knows locks.
    """

    user: str
    host: str
    pid: int
    since: str
    start: str
    kernel: str
    device: int
    locked: bool

    def is_kept_out_by(self, other: "Owner") -> bool:
        """Whether the kernel keeps this one from a lock that `other` holds, renewed or not."""
        here = (self.kernel, self.device)
        return self.locked and other.locked and here == (other.kernel, other.device)

    def __str__(self) -> str:
        return f"{self.user} (pid {self.pid} on {self.host}, since {self.since})"


class WorkdirLock:
    """Holds the lock of a workdir while the block runs.

    with WorkdirLock(workdir) as lock:
        lock.check()  # before each write
    """

    def __init__(
        self,
        workdir: Path,
        *,
        enabled: bool = True,
        abandoned_seconds: float = ABANDONED_SECONDS,
        also: Callable[[], None] = lambda: None,
    ):
        """Takes the lock, and makes the folder if it is absent.

        Args:
          also: called by each `check`; raises WorkdirLost where the folder's home is another run's.
          enabled: False on all processes of a run but one; then nothing is read or written.
          abandoned_seconds: for how long a lock is watched whose owner cannot be asked for.

        Attributes:
          start: a random text of this start, for the files that it owns; empty if not `enabled`.

        Raises:
          ConfigError: if another run goes on there, and whose; or if the folder cannot be written.
        """
        self._file = workdir / FILE_NAME
        self._enabled, self._also = enabled, also
        self._mutex = threading.Lock()
        self._closed = threading.Event()
        self._lost: str | None = None  # how this run lost the lock
        self._made: list[Path] = []
        self.start = ""
        if not enabled:
            return
        try:
            self._made = _absent(workdir)
            taken = None
            while taken is None:
                wait_for_lock(workdir, abandoned_seconds=abandoned_seconds)
                workdir.mkdir(parents=True, exist_ok=True)
                taken = _take(self._file)
        except OSError as error:
            told = f"cannot write {self._file}: {error.strerror}"
            if error.errno == errno.ENOSPC:  # which has two causes
                told = in_words(storage_failure(f"write {self._file}", workdir, errno.ENOSPC))
            self._remove_made()
            raise ConfigError(told) from error
        except ConfigError:
            self._remove_made()
            raise
        self._descriptor, self._owner = taken
        self.start = self._owner.start
        self._made_file = os.fstat(self._descriptor)
        self._renewed_at = seconds_awake_or_not()
        threading.Thread(target=self._keep, name="lock", daemon=True).start()

    def check(self) -> None:
        """Raises WorkdirLost, saying how, if the lock is this run's no more.

        It reads a small file; any thread may call it.
        """
        if not self._enabled or self._closed.is_set():
            return
        self._also()
        self._look()
        if self._lost is not None:
            raise WorkdirLost(self._lost)

    def __enter__(self) -> "WorkdirLock":
        return self

    def __exit__(self, *exception: object) -> None:
        """Gives the lock back; if it is lost, raises WorkdirLost whatever else went wrong."""
        if not self._enabled:
            return
        try:
            self.check()
        finally:
            with self._mutex:
                self._closed.set()
                if self._lost is None:
                    with contextlib.suppress(OSError):
                        self._file.unlink()
                os.close(self._descriptor)
            if self._lost is None:  # else the folders may be another's
                self._remove_made()

    def _keep(self) -> None:
        while not self._closed.wait(RENEW_SECONDS):
            self._look()
            with self._mutex, contextlib.suppress(OSError):
                if self._lost is not None or self._closed.is_set():
                    return
                began = seconds_awake_or_not()  # it may be held up in the write
                _write(self._descriptor, self._owner)
                self._renewed_at = began

    def _look(self) -> None:
        """Sees whose lock it is; where that cannot be read now, the next look may show it."""
        other, same_file = None, False
        try:
            with self._file.open("rb") as file:
                owner = _owner(file.read())
                same_file = os.path.samestat(os.fstat(file.fileno()), self._made_file)
            other = None if owner is None or owner.start == self._owner.start else owner
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return
        if self._lost is None and (other is not None or not same_file):
            self._lost = self._how_lost(other)

    def _how_lost(self, other: Owner | None) -> str:
        """In words, and what follows; `other` holds the lock now."""
        workdir = self._file.parent
        silent = seconds_awake_or_not() - self._renewed_at
        ends = "this process ends, and writes nothing more"
        waited = other is None or not other.is_kept_out_by(self._owner)
        silence = f"nothing was heard of this process for {silent:.0f} s"
        if other is not None and waited and silent >= ABANDONED_SECONDS:
            return f"{other} has taken over {workdir}, since {silence}: {ends}"
        if not workdir.is_dir():
            return (
                f"{workdir} was deleted or moved while this run went on there: {ends}. If it was "
                "moved, the same command goes on with its new path as --workdir"
            )
        if waited and silent >= ABANDONED_SECONDS:
            return (
                f"{silence}, and {self._file} is gone: another run may have taken over {workdir} "
                f"and ended, or the file was deleted: {ends}. The same command goes on from the "
                "newest checkpoint"
            )
        deleted = f"{self._file} was deleted while this run went on, and"
        if other is not None:
            return f"{deleted} {other} has begun there: {ends}"
        return (
            f"{deleted} another one may begin there at any time: {ends}. The same command goes on "
            "from the newest checkpoint"
        )

    def _remove_made(self) -> None:
        """Removes the folders that were made for the lock, unless something lies in them now."""
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def wait_for_lock(
    workdir: Path, seconds: float = 0.0, abandoned_seconds: float = ABANDONED_SECONDS
) -> None:
    """Returns when no run goes on in `workdir`; removes only a dead run's lock.

    Args:
      seconds: how long to wait for the end of a run. A lock whose owner cannot be asked for, since
        it is of another host, is watched for `abandoned_seconds` in any case.

    Raises:
      ConfigError: if a run still goes on, and whose it is.
    """
    file = workdir / FILE_NAME
    begun = time.monotonic()
    first: bytes | None = None
    seen, seen_at = b"", begun
    while (held := _held(file)) is not None:
        now = time.monotonic()
        if held.content != seen:
            seen, seen_at = held.content, now
        if not held.by_kernel and now - seen_at >= abandoned_seconds:
            _remove(file, held.content)
            continue
        lives = held.by_kernel or (first is not None and held.content != first)
        if lives and now - begun >= seconds:
            raise ConfigError(
                f"{workdir} is in use by {held}: one run at a time; end that one or use another "
                "workdir"
            )
        if first is None:
            first = held.content
            limit = max(seconds, 0.0 if lives else abandoned_seconds)
            print(
                f"{workdir} is locked by {held}: waiting, for {limit:g} s at most",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(1.0, abandoned_seconds / 10))


@dataclasses.dataclass(frozen=True)
class _Held:
    """A lock that another process may hold; `by_kernel` if it certainly does."""

    content: bytes
    owner: Owner | None
    by_kernel: bool

    def __str__(self) -> str:
        return f"the run of {self.owner}" if self.owner else "a run that has just begun"


def _held(file: Path) -> _Held | None:
    """The lock, unless it is absent or of a process that is certainly dead."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _held_at(descriptor, _flock(descriptor, fcntl.LOCK_SH))
    finally:
        os.close(descriptor)


def _held_at(descriptor: int, locked: bool | None) -> _Held | None:
    content = os.pread(descriptor, 1 << 16, 0)
    owner = _owner(content)
    if locked is False:
        return _Held(content, owner, by_kernel=True)
    if owner is None:
        return None
    here = (kernel(), os.fstat(descriptor).st_dev)
    dead = locked and owner.locked and (owner.kernel, owner.device) == here
    return None if dead else _Held(content, owner, by_kernel=False)


def _take(file: Path) -> tuple[int, Owner] | None:
    """The file, open and locked, and what was written into it; `None` if another was faster."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        locked = _flock(descriptor, fcntl.LOCK_EX)
        faster = locked is False or not _is_at(descriptor, file)
        if not faster and _held_at(descriptor, locked) is None:
            owner = _this_process(os.fstat(descriptor).st_dev, locked is True)
            _write(descriptor, owner)
            kept, descriptor = descriptor, -1
            return kept, owner
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _flock(descriptor: int, kind: int) -> bool | None:
    """Whether the lock was to be had; `None` where there are no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, file: Path) -> bool:
    """Whether `file` is still the one that is open: a dead run's is removed, and made anew."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _remove(file: Path, content: bytes) -> None:
    """Removes the file, never to be written again by its owner, unless its content has changed.

    Removed rather than written: what its owner, should it wake up, still writes is then lost.
    """
    with contextlib.suppress(FileNotFoundError):
        if file.read_bytes() == content:
            file.unlink()


def _write(descriptor: int, owner: Owner) -> None:
    """The content has always the same length, so that it is never read half old and half new."""
    renewed = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    fields = {**dataclasses.asdict(owner), "renewed": renewed}
    written = json.dumps(fields, indent=1).encode() + b"\n"
    os.pwrite(descriptor, written, 0)
    os.ftruncate(descriptor, len(written))
    os.fsync(descriptor)


def _owner(content: bytes) -> Owner | None:
    try:
        fields: Any = parse_json(content)
        return Owner(**{field.name: fields[field.name] for field in dataclasses.fields(Owner)})
    except (ValueError, KeyError, TypeError):
        return None


def _this_process(device: int, locked: bool) -> Owner:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # some containers have users without names
        user = f"user {os.getuid()}"
    return Owner(
        user=user,
        host=socket.gethostname(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        start=secrets.token_hex(8),
        kernel=kernel(),
        device=device,
        locked=locked,
    )


def kernel() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def seconds_awake_or_not() -> float:
    """A clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _absent(folder: Path) -> list[Path]:
    """Those of the folder and its parents that do not exist, innermost first."""
    absent = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        absent.append(each)
    return absent
