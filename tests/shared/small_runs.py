"""Small runs through the real command line, begun, watched and ended."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_experiment
from compiled_programs import XLA_FLAGS
from forked_processes import ForkedProcess, Running, fresh_process

EXPERIMENT = (f"--fdl_config={small_experiment.__file__}", "--fdl.validation=None")


class SmallRun(Running):
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
        workdir.parent.mkdir(parents=True, exist_ok=True)
        super().__init__([workdir.with_suffix(".output")])
        settings = (f"--fdl.{override}" for override in overrides)
        arguments = (*experiment, *settings, f"--workdir={workdir}", *flags)
        with self.files[0].open("w") as file:
            self.running[0] = (fresh_process if fresh else ForkedProcess)(
                *("-m", module, *arguments),
                stdout=file,
                stderr=file,
                environment={"XLA_FLAGS": XLA_FLAGS, **(environment or {})},
            )

    @property
    def process(self) -> Any:
        return self.running[0]

    def wait_for(self, what: str) -> None:
        """Until `what` is in the output."""
        self.wait_until(lambda: what in self.output(), what)

    def exit_code(self) -> int | None:
        (code,) = self.exit_codes()
        return code
