"""The program that the devices run, as XLA optimised it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

GRAPH_SECONDS = 60  # Graphviz may take hours over the graph of a large program


def dump_program(compiled: jax.stages.Compiled, workdir: Path, name: str = "train_step") -> str:
    """Writes the program as XLA optimised it: workdir/hlo/`name`.txt and, where Graphviz's `dot` is
    installed, the graph of the same program as `name`.svg.

    Returns a line that says what was written, and if there is no graph, why.
    """
    folder = workdir / "hlo"
    folder.mkdir(parents=True, exist_ok=True)
    text, graph = folder / f"{name}.txt", folder / f"{name}.svg"
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
