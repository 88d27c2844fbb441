"""Two processes of JAX's on one machine, which run a program together."""

import contextlib
import os
from tempfile import TemporaryFile
from typing import Any

from compiled_programs import XLA_FLAGS
from forked_processes import ROOT, Ended, ForkedProcess
from started import SECONDS, free_address


def ends_of_two(
    code: str, *arguments: object, start: Any = ForkedProcess, count: int = 2, devices: int = 2
) -> list[Ended]:
    """Runs `code` in `count` processes of `devices`, with `arguments`, an address and a number."""
    address = free_address()
    environment = {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "tests/shared"), os.environ.get("PYTHONPATH", "")]
        ),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {XLA_FLAGS}",
    }
    children, found = [], []
    with contextlib.ExitStack() as ends:
        for index in range(count):
            output, errors = (ends.enter_context(TemporaryFile("w+")) for _ in range(2))
            child = start(
                *("-c", code, *map(str, (*arguments, address, index))),
                stdout=output,
                stderr=errors,
                environment=environment,
            )
            ends.callback(child.kill)
            children.append((child, output, errors))
        for child, output, errors in children:
            status = child.wait(SECONDS)
            output.seek(0), errors.seek(0)
            found.append(Ended(status, output.read(), errors.read()))
    return found


def run_two(code: str, *arguments: object, **settings: int) -> list[str]:
    """The last line that each prints; all must end well. See `ends_of_two`."""
    found = ends_of_two(code, *arguments, **settings)
    for ended in found:
        assert ended.returncode == 0, ended.stderr
    return [ended.stdout.splitlines()[-1] for ended in found]
