"""Traces and programs as they lie on disk."""

import gzip
import json
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

from runner.command_line.errors import ConfigError
from runner.watch.profiling import Profiler, dump_program, steps_range


@pytest.mark.parametrize(
    ("text", "steps"), [("10:12", [10, 11, 12]), ("1:1", [1]), ("9:11", [9, 10, 11])]
)
def test_both_ends_are_in_the_range(text, steps):
    assert list(steps_range(text)) == steps


@pytest.mark.parametrize(
    "text", ["", "10", "10:", ":12", "12:10", "0:3", "-1:3", "1:2:3", "1.5:3", "a:b", "²:³"]
)
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match="write the first and the last step"):
        steps_range(text)


def traces(workdir: Path) -> list[str]:
    """The text of each trace that Perfetto opens."""
    files = workdir.glob("profile/**/perfetto_trace.json.gz")
    return [gzip.decompress(file.read_bytes()).decode() for file in files]


@jax.jit
def traced_step(x):
    return jnp.tanh(x @ x)


def run(profiler: Profiler, steps: range) -> None:
    x = jnp.ones((64, 64))
    for step in steps:
        profiler.before(step)
        with jax.profiler.TraceAnnotation(f"made step {step}"):
            x = traced_step(x)
        profiler.after(step, wait_for=x)


def test_the_trace_holds_the_steps_of_the_range_and_no_others(tmp_path):
    with Profiler(tmp_path, range(3, 5)) as profiler:
        run(profiler, range(1, 7))
        (trace,) = traces(tmp_path)  # written at the end of the range, not of the run
    names = {event.get("name") for event in json.loads(trace)["traceEvents"]}
    assert {name for name in names if name and name.startswith("made step")} == {
        "made step 3",
        "made step 4",
    }
    assert any("traced_step" in name for name in names if name)


@pytest.mark.slow
@pytest.mark.parametrize("made", [range(1, 4), range(4, 9)], ids=["stopped", "resumed"])
def test_a_run_that_stops_or_resumes_inside_the_range_is_traced(tmp_path, made):
    with Profiler(tmp_path, range(3, 7)) as profiler:
        run(profiler, made)
    (trace,) = traces(tmp_path)
    assert f"made step {max(3, made.start)}" in trace


@pytest.mark.slow
def test_an_error_inside_the_range_ends_the_trace(tmp_path):
    with pytest.raises(KeyError), Profiler(tmp_path / "first", range(1, 7)) as profiler:
        run(profiler, range(1, 3))
        raise KeyError
    assert len(traces(tmp_path / "first")) == 1
    with Profiler(tmp_path / "second", range(1, 2)) as profiler:
        run(profiler, range(1, 2))
    assert len(traces(tmp_path / "second")) == 1


@pytest.mark.parametrize("steps", [None, range(50, 60)])
def test_without_steps_nothing_is_traced(tmp_path, steps):
    with Profiler(tmp_path, steps) as profiler:
        run(profiler, range(1, 3))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def compiled() -> jax.stages.Compiled:
    return jax.jit(jax.grad(lambda x: jnp.tanh(x @ x).sum())).lower(jnp.ones((8, 8))).compile()


def test_the_program_is_the_optimised_one(tmp_path, compiled):
    message = dump_program(compiled, tmp_path)
    text = tmp_path / "hlo" / "train_step.txt"
    assert text.read_text() == compiled.as_text()
    assert str(text) in message
    graph = tmp_path / "hlo" / "train_step.svg"
    if shutil.which("dot"):
        assert ElementTree.parse(graph).getroot().tag.endswith("svg")
        assert "fusion" in compiled.as_text()  # only the optimised program has fusions
        assert "fusion" in graph.read_text().lower()
        assert str(graph) in message
    else:
        assert not graph.exists()


def test_without_graphviz_there_is_no_graph_and_a_reason(tmp_path, compiled, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    stale = tmp_path / "hlo" / "train_step.svg"
    stale.parent.mkdir()
    stale.write_text("of an earlier program")
    assert "no graph, since Graphviz's dot is not installed" in dump_program(compiled, tmp_path)
    assert [file.name for file in (tmp_path / "hlo").iterdir()] == ["train_step.txt"]


def test_a_graphviz_that_fails_does_not_end_the_run(tmp_path, compiled, monkeypatch):
    (tmp_path / "dot").symlink_to(shutil.which("false"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "no graph: Command" in dump_program(compiled, tmp_path)
