"""The dumped program as it lies on disk."""

import os
import shutil
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

from runner.monitoring.program_dump import dump_program


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
