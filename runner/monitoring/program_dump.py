"""Dumps the optimised XLA program that the devices run."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

GRAPH_SECONDS = 60  # Graphviz may need hours for the graph of a large program


def dump_program(compiled: jax.stages.Compiled, workdir: Path, name: str = "train_step") -> str:
    """Writes the optimised program to workdir/hlo/`name`.txt, and its graph to `name`.svg.

    The graph needs Graphviz's `dot`.

    Returns:
      A message that names the files; it says why if there is no graph.
    """
    folder = workdir / "hlo"
    folder.mkdir(parents=True, exist_ok=True)
    text, graph = folder / f"{name}.txt", folder / f"{name}.svg"
    program = compiled.as_text()
    assert program is not None  # XLA programs always have a text
    text.write_text(program, encoding="utf-8")
    graph.unlink(missing_ok=True)  # the graph of an earlier program
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
    """Returns the optimised program in the DOT language."""
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    # Only the class HloComputation can draw a program, and JAX exposes it only via an instance.
    computation: Any = type(jax.jit(lambda: 0).lower().compiler_ir("hlo"))
    return computation(module.as_serialized_hlo_module_proto()).as_hlo_dot_graph()
