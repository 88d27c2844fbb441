"""Two processes of JAX's on one machine, which run a program together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import lmlib

ROOT = Path(lmlib.__file__).parents[1]
SECONDS = 400  # that they may take


def run_two(code: str, *arguments: object) -> list[str]:
    """The last line that each prints. `code` gets `arguments`, a free port, and which of the two it
    is, 0 or 1; each has two devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # The second flag keeps the collectives of a process's devices in one order.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 "
        "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0",
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, (*arguments, port, index))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    lines = []
    for child in children:
        output, errors = child.communicate(timeout=SECONDS)
        assert child.returncode == 0, errors
        lines.append(output.splitlines()[-1])
    return lines
