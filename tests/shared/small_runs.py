"""Small runs through the real command line, begun, watched and ended."""

from collections.abc import Mapping
from pathlib import Path

import small_experiment
from compiled_programs import XLA_FLAGS
from started import Started

EXPERIMENT = (f"--fdl_config={small_experiment.__file__}", "--fdl.validation=None")


class SmallRun(Started):
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
        """Starts it; `fresh` as `fresh_process` does. `environment` has variables of its own."""
        workdir.parent.mkdir(parents=True, exist_ok=True)
        super().__init__([workdir.with_suffix(".output")])
        settings = (f"--fdl.{override}" for override in overrides)
        arguments = (*experiment, *settings, f"--workdir={workdir}", *flags)
        variables = {"XLA_FLAGS": XLA_FLAGS, **(environment or {})}
        self.start(0, "-m", module, *arguments, fresh=fresh, environment=variables)

    def exit_code(self) -> int:
        (code,) = self.exit_codes()
        return code
