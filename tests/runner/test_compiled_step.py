"""Compiled steps: saved by one run for another, and dumped as text and graph."""

import json
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from forked_processes import Ended, run_forked
from small_runs import EXPERIMENT

from runner.command_line.exit_status import MISTAKE
from runner.monitoring.program_dump import dump_program


def run(workdir: Path, *flags: str) -> Ended:
    return run_forked("-m", "runner", *EXPERIMENT, "--fdl.steps=3", f"--workdir={workdir}", *flags)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run, and its compiled step."""
    folder = tmp_path_factory.mktemp("compiled")
    # JAX keeps its program in a cache now, from where it could not be saved again.
    assert run(folder / "first").returncode == 0
    done = run(folder / "saving", f"--save_compiled={folder / 'step'}")
    assert done.returncode == 0, done.stderr
    assert "compiled the step in" in done.stderr
    assert f"wrote the compiled step to {folder / 'step'}" in done.stderr
    return folder


def losses(workdir: Path) -> list[float]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_another_process_takes_it_and_trains_to_the_same_bits(saved):
    done = run(saved / "second", f"--compiled={saved / 'step'}")
    assert done.returncode == 0, done.stderr
    assert f"took the compiled step out of {saved / 'step'}" in done.stderr
    assert "compiled the step in" not in done.stderr
    assert losses(saved / "second") == losses(saved / "first")
    assert len(losses(saved / "first")) == 3


@pytest.mark.slow
def test_a_run_of_another_length_and_rate_takes_it_too(saved, tmp_path):
    flags = ("--fdl.optimizer.peak_lr=1e-4", "--fdl.optimizer.weight_decay=0.0", "--fdl.steps=4")
    done = run(tmp_path / "compiled", *flags, "--fdl.seed=1", f"--compiled={saved / 'step'}")
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "anew", *flags, "--fdl.seed=1").returncode == 0
    assert losses(tmp_path / "compiled") == losses(tmp_path / "anew")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--fdl.optimizer.b1=0.8", "--fdl.model.embed=32"),
            "was compiled for another run: the arguments differ; the program differs; the config "
            "differs in model.embed, optimizer.b1",
        ),
        (("--fdl.mesh.fsdp=4",), "devices 8 of kind cpu, here 4"),
    ],
)
def test_that_of_another_config_is_refused(saved, tmp_path, flags, told):
    refused = run(tmp_path / "refused", f"--compiled={saved / 'step'}", *flags)
    assert refused.returncode == MISTAKE
    assert told in refused.stderr
    assert "compile anew: leave it out" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_a_damaged_file_is_refused_before_it_is_unpickled(saved, tmp_path):
    content = bytearray((saved / "step").read_bytes())
    content[-1000] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    refused = run(tmp_path / "run", f"--compiled={tmp_path / 'damaged'}")
    assert refused.returncode == MISTAKE
    assert f"--compiled={tmp_path / 'damaged'} is damaged" in refused.stderr


@pytest.mark.slow
def test_another_file_is_refused(tmp_path):
    (tmp_path / "text").write_text("text")
    refused = run(tmp_path / "run", f"--compiled={tmp_path / 'text'}")
    assert refused.returncode == MISTAKE
    assert "is no compiled step" in refused.stderr
    missing = run(tmp_path / "run", f"--compiled={tmp_path / 'missing'}")
    assert missing.returncode == MISTAKE
    assert "missing: No such file" in missing.stderr


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
