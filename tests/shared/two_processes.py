"""Two processes of JAX's on one machine, which run a program together."""

import contextlib
import os
import socket
from tempfile import TemporaryFile

from compiled_programs import XLA_FLAGS
from forked_processes import ROOT, ForkedProcess

SECONDS = 400  # that they may take


def run_two(code: str, *arguments: object) -> list[str]:
    """The last line that each prints. `code` gets `arguments`, a free port, and which of the two it
    is, 0 or 1; each has two devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}",
    }
    children, lines = [], []
    with contextlib.ExitStack() as ends:
        for index in range(2):
            output, errors = (ends.enter_context(TemporaryFile("w+")) for _ in range(2))
            child = ForkedProcess(
                *("-c", code, *map(str, (*arguments, port, index))),
                stdout=output,
                stderr=errors,
                environment=environment,
            )
            ends.callback(child.kill)
            children.append((child, output, errors))
        for child, output, errors in children:
            child.wait(SECONDS)
            output.seek(0), errors.seek(0)
            assert child.returncode == 0, errors.read()
            lines.append(output.read().splitlines()[-1])
    return lines
