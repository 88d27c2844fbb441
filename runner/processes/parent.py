"""Connects a process to its parent, so that it ends when the parent ends, even if that is killed.

Each holds one end of a socket, which the kernel closes when its process ends. So a child cannot
miss the end of its parent. To a supervisor, the child also reports its state over the socket.
"""

import json
import os
import signal
import socket
import threading

_VARIABLE = "RUNNER_PARENT"  # environment variable with the child's end of the connection


class Parent:
    """This process as the parent of children that call `connect_to_parent` when they start."""

    def __init__(self, supervises: bool = False):
        self.connection, self.of_child = socket.socketpair()
        number = self.of_child.fileno()
        role = "supervisor" if supervises else ""
        value = f"{number} {os.fstat(number).st_ino} {role}"
        self.pass_fds = [number]  # for `subprocess.Popen`
        self._variable = {_VARIABLE: value}

    @property
    def environment(self) -> dict[str, str]:
        """The environment for `subprocess.Popen`: this process's, with the connection."""
        return {**os.environ, **self._variable}


class Supervisor:
    """The supervisor of this process."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def tell(self, process: int, processes: int, connected: bool) -> None:
        """Reports the number of this process, and the number of processes in the run.

        Args:
          connected: True if JAX has connected this process to the others.
        """
        fact = {"process": process, "processes": processes, "connected": connected}
        self._connection.sendall(json.dumps(fact).encode() + b"\n")


def connect_to_parent() -> Supervisor | None:
    """Makes this process end when its `Parent` ends, if it has one; returns a supervisor."""
    # Removed, so that child processes of this one don't inherit it.
    given = os.environ.pop(_VARIABLE, None)
    if given is None:
        return None
    number, inode, *supervises = given.split()
    try:
        if os.fstat(int(number)).st_ino != int(inode):
            return None
    except OSError:  # `--launcher` may start it on another machine with only the environment
        return None
    connection = socket.socket(fileno=int(number))
    connection.set_inheritable(False)
    threading.Thread(target=_end_after, args=(connection,), name="parent", daemon=True).start()
    return Supervisor(connection) if supervises else None


def _end_after(connection: socket.socket) -> None:
    while connection.recv(1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
