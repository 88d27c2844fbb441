"""A process that ends when its parent does, also when the parent is killed.

The parent holds one end of a connection, and the kernel closes it with the parent. So there is no
moment in which a child could miss the end of its parent.
"""

import os
import signal
import socket
import threading

_VARIABLE = "RUNNER_PARENT"  # the environment's name for the child's end of the connection


class Parent:
    """This process, to children whose command calls `end_with_parent` as it begins."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()

    @property
    def pass_fds(self) -> list[int]:
        """For `subprocess.Popen`."""
        return [self._theirs.fileno()]

    @property
    def environment(self) -> dict[str, str]:
        """For `subprocess.Popen`: the environment of this process, with the connection."""
        number = self._theirs.fileno()
        return {**os.environ, _VARIABLE: f"{number} {os.fstat(number).st_ino}"}


def end_with_parent() -> None:
    """From now on this process ends when its `Parent` does, if it has one."""
    # Taken out: it is not for the processes that this one starts.
    given = os.environ.pop(_VARIABLE, None)
    if given is None:
        return
    descriptor, inode = map(int, given.split())
    try:
        if os.fstat(descriptor).st_ino != inode:
            return
    except OSError:  # `--through` may start it on another machine, with only the environment
        return
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    threading.Thread(target=end_after, args=(connection,), name="parent", daemon=True).start()


def end_after(connection: socket.socket) -> None:
    """Ends this process when the other end of `connection` is closed."""
    while connection.recv(1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
