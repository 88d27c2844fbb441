"""Every notebook runs from its first cell to its last, with the kinds of output stored in it.

Its runs are made short, and their programs are compiled like other tests' programs."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from compiled_programs import XLA_FLAGS

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 300_000  # bytes
SHORTER = (  # all that notebooks count in steps, and in layers and seeds
    (r"\b(?:100|200|300)\b", "6"),
    (r"steps=150\b", "steps=6"),
    (r"evaluation\.every=50\b", "evaluation.every=2"),
    (r"(quickstart\.tiny\(cfg\))", r"\1; cfg.model.layers = cfg.compute.unroll = 1"),
    (r'("--fiddler=tiny",)',
     r'\1 "--fdl.model.layers=1", "--fdl.compute.unroll=1", "--fdl.samples.prompts=()",'),
    (r"seed=0,1,2", "seed=0,1"),
    (r'(?<="--xla_force_host_platform_device_count=8)', f" {XLA_FLAGS}"),
)  # fmt: skip


def kinds(notebook):
    """Returns the kinds of output of each cell of code."""
    return [
        sorted({kind for output in cell.outputs for kind in output.get("data", {"text/plain": ""})})
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_notebooks_and_they_are_small():
    assert len(NOTEBOOKS) >= 3
    assert [path.name for path in NOTEBOOKS if path.stat().st_size > LARGEST] == []


def short(notebook):
    """The notebook with fewer steps."""
    found = nbformat.read(notebook, as_version=4)
    for cell in found.cells:
        if cell.cell_type == "code":
            for pattern, shorter in SHORTER:
                cell.source = re.sub(pattern, shorter, cell.source)
    return found


def test_commands_that_tests_shorten_exist():
    code = "\n".join(
        cell.source
        for path in NOTEBOOKS
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
    )
    assert [pattern for pattern, _ in SHORTER if not re.search(pattern, code)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_it_runs(name, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)  # unless a notebook says its own
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    path = FOLDER / f"{name}.ipynb"
    assert kinds(run.ran(short(path))) == kinds(nbformat.read(path, as_version=4))
