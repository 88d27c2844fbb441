"""Many commands, each a process of its own, for the time of one import.

A server process imports everything, and forks for each command: `python -m MODULE ARGUMENTS` then
takes a fraction of a second, with its own exit code, output and environment.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import runner

ROOT = Path(runner.__file__).parents[1]

_SERVER = """
import json, os, runpy, sys, traceback
import jax, fiddle, orbax.checkpoint, absl.app, fiddle.absl_flags
import runner.training.fit, runner.config.saved_config, data_tools.command_line
import experiments.llama_84m, experiments.quickstart

for line in sys.stdin:
    module, arguments, output = json.loads(line)
    child = os.fork()
    if child == 0:
        with open(output + ".out", "wb") as out, open(output + ".err", "wb") as err:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        sys.argv = [module, *arguments]
        status = 1
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as exit:
            status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


class Commands:
    """Runs commands one after the other. Close it."""

    def __init__(self, scratch: Path):
        """What the commands write goes through files in `scratch`."""
        self._output = scratch / "output"
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, module: str, arguments: Sequence[str]) -> Ended:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps([module, list(arguments), str(self._output)]) + "\n")
        self._server.stdin.flush()
        returncode = int(self._server.stdout.readline())
        out, err = (self._output.with_suffix(end).read_text() for end in (".out", ".err"))
        return Ended(returncode, out, err)

    def close(self) -> None:
        self._server.communicate()
