"""What the devices did: a trace of some steps, and the program that they ran."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

import jax

from runner.errors import ConfigError


def steps_range(text: str) -> range:
    """The steps of "10:12": 10, 11 and 12.

    Raises:
      ConfigError: if `text` is not two positive numbers in order.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"--profile={text}: write the first and the last step to trace, 10:12")
    return range(int(first), int(last) + 1)


class Profiler:
    """Traces `steps` into workdir/profile, for Perfetto and TensorBoard; a context manager."""

    def __init__(self, workdir: Path, steps: range | None):
        self._folder = workdir / "profile"
        self._steps = steps or range(0)
        self._tracing = False

    def before(self, step: int) -> None:
        if step in self._steps and not self._tracing:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._tracing = True

    def after(self, step: int, wait_for: Any) -> None:
        """Ends the trace after the last of the steps, once `wait_for` is computed."""
        if self._tracing and step + 1 not in self._steps:
            jax.block_until_ready(wait_for)
            self.close()

    def close(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def dump_program(compiled: jax.stages.Compiled, workdir: Path) -> str:
    """Writes the program as XLA optimised it: workdir/hlo/train_step.txt and, where Graphviz's
    `dot` is installed, its graph as train_step.svg. Returns a line that says so."""
    folder = workdir / "hlo"
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "train_step.txt"
    text.write_text(compiled.as_text())
    if shutil.which("dot") is None:
        return f"wrote {text}; no graph, since Graphviz's dot is not installed"
    graph = folder / "train_step.svg"
    command = ["dot", "-Tsvg", "-o", str(graph)]
    subprocess.run(command, input=_graph(compiled), text=True, check=True)
    return f"wrote {text} and {graph}"


def _graph(compiled: jax.stages.Compiled) -> str:
    """The optimised program in Graphviz's language."""
    (module,) = compiled.runtime_executable().hlo_modules()
    # Only a computation draws itself, and JAX hands out its class only with an instance.
    computation = type(jax.jit(lambda: 0).lower().compiler_ir("hlo"))
    return computation(module.as_serialized_hlo_module_proto()).as_hlo_dot_graph()
