"""Small runs through the real command line, begun, watched and ended."""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import small_experiment
from compiled_programs import XLA_FLAGS
from forked_processes import ForkedProcess, fresh_process

SECONDS = 240.0  # that anything may take
EXPERIMENT = (f"--fdl_config={small_experiment.__file__}", "--fdl.validation=None")


class SmallRun:
    """`python -m runner` on one CPU device, its output going to a file beside the workdir."""

    def __init__(
        self,
        workdir: Path,
        *overrides: str,
        flags: tuple[str, ...] = (),
        experiment: tuple[str, ...] = EXPERIMENT,
        fresh: bool = False,
        environment: Mapping[str, str] | None = None,
        module: str = "runner",
    ):
        """Starts it; `fresh`: as `fresh_process` does. `environment`: variables of its own."""
        self.workdir = workdir
        workdir.parent.mkdir(parents=True, exist_ok=True)
        self._file = workdir.with_suffix(".output")
        settings = (f"--fdl.{override}" for override in overrides)
        arguments = (*experiment, *settings, f"--workdir={workdir}", *flags)
        with self._file.open("w") as file:
            self.process = (fresh_process if fresh else ForkedProcess)(
                *("-m", module, *arguments),
                stdout=file,
                stderr=file,
                environment={"XLA_FLAGS": XLA_FLAGS, **(environment or {})},
            )

    def output(self) -> str:
        return self._file.read_text()

    def wait_for(self, what: str) -> None:
        """Until `what` is in the output."""
        self.wait_until(lambda: what in self.output(), what)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"no {what!r} in\n{self.output()}"
            try:
                self.process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
            assert condition(), f"ended before {what!r}\n{self.output()}"

    def exit_code(self) -> int:
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
