"""What the devices did: a trace of some steps, and the program that they ran."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

from runner.command_line.errors import ConfigError

GRAPH_SECONDS = 60  # Graphviz may take hours over the graph of a large program


def steps_range(text: str) -> range:
    """The steps of "10:12": 10, 11 and 12.

    Raises:
      ConfigError: if `text` is not two positive numbers in order.
    """
    first, _, last = text.partition(":")
    digits = first.isdecimal() and last.isdecimal()
    if not digits or not 1 <= int(first) <= int(last):
        raise ConfigError(f"--profile={text}: write the first and the last step to trace, 10:12")
    return range(int(first), int(last) + 1)


class Profiler:
    """Traces steps into workdir/profile.

    Of the files there, perfetto_trace.json.gz opens in ui.perfetto.dev.

        with Profiler(workdir, steps_range("10:12")) as profiler:
            profiler.before(10)
            ...
            profiler.after(10, wait_for=metrics)
    """

    def __init__(self, workdir: Path, steps: range | None):
        """`steps=None` traces nothing."""
        self._folder = workdir / "profile"
        self._steps = steps or range(0)
        self._tracing = False

    def before(self, step: int) -> None:
        """Begins the trace if `step` is the first of the steps, or a resumed run's first of them.

        Steps dispatched earlier and still running are in the trace too.
        """
        if step in self._steps and not self._tracing:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._tracing = True

    def after(self, step: int, wait_for: Any) -> None:
        """Ends the trace if `step` is the last of the steps, once the arrays `wait_for` exist."""
        if self._tracing and step + 1 not in self._steps:
            jax.block_until_ready(wait_for)
            self.close()

    def close(self) -> None:
        """Ends and writes the trace, if one has begun."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def dump_program(compiled: jax.stages.Compiled, workdir: Path) -> str:
    """Writes the program as XLA optimised it: workdir/hlo/train_step.txt and, where Graphviz's
    `dot` is installed, the graph of the same program as train_step.svg.

    Returns a line that says what was written, and if there is no graph, why.
    """
    folder = workdir / "hlo"
    folder.mkdir(parents=True, exist_ok=True)
    text, graph = folder / "train_step.txt", folder / "train_step.svg"
    program = compiled.as_text()
    assert program is not None  # XLA's programs have a text
    text.write_text(program, encoding="utf-8")
    graph.unlink(missing_ok=True)  # an earlier program's
    if shutil.which("dot") is None:
        return f"wrote {text}; no graph, since Graphviz's dot is not installed"
    try:
        subprocess.run(
            ["dot", "-Tsvg", "-o", str(graph)],
            input=_graph(compiled),
            text=True,
            check=True,
            capture_output=True,
            timeout=GRAPH_SECONDS,
        )
    except subprocess.SubprocessError as error:
        graph.unlink(missing_ok=True)
        return f"wrote {text}; no graph: {error}"
    return f"wrote {text} and {graph}"


def _graph(compiled: jax.stages.Compiled) -> str:
    """The optimised program in Graphviz's language."""
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    # Only a computation draws itself, and JAX hands out its class only with an instance.
    computation: Any = type(jax.jit(lambda: 0).lower().compiler_ir("hlo"))
    return computation(module.as_serialized_hlo_module_proto()).as_hlo_dot_graph()
