"""Ends a process when its parent ends, even if the parent is killed.

The parent holds one end of a socket, which the kernel closes when the parent ends. So a child
cannot miss the end of its parent.
"""

import os
import signal
import socket
import threading

_VARIABLE = "RUNNER_PARENT"  # environment variable with the child's end of the connection


class Parent:
    """This process as the parent of children that call `end_with_parent` when they start."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()

    @property
    def pass_fds(self) -> list[int]:
        """File descriptors to pass to `subprocess.Popen`."""
        return [self._theirs.fileno()]

    @property
    def environment(self) -> dict[str, str]:
        """The environment for `subprocess.Popen`: this process's, with the connection."""
        number = self._theirs.fileno()
        return {**os.environ, _VARIABLE: f"{number} {os.fstat(number).st_ino}"}


def end_with_parent() -> None:
    """Makes this process end when its `Parent` ends, if it has one."""
    # Removed, so that child processes of this one don't inherit it.
    given = os.environ.pop(_VARIABLE, None)
    if given is None:
        return
    descriptor, inode = map(int, given.split())
    try:
        if os.fstat(descriptor).st_ino != inode:
            return
    except OSError:  # `--launcher` may start it on another machine with only the environment
        return
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    threading.Thread(target=end_after, args=(connection,), name="parent", daemon=True).start()


def end_after(connection: socket.socket) -> None:
    """Ends this process when the other end of `connection` is closed."""
    while connection.recv(1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
