"""Every notebook runs from its first cell to its last, and shows what it shows here."""

import importlib.util
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 300_000  # bytes


def kinds(notebook):
    """Of each cell of code, what kinds of output it has."""
    return [
        sorted({kind for output in cell.outputs for kind in output.get("data", {"text/plain": ""})})
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_notebooks_and_they_are_small():
    assert len(NOTEBOOKS) >= 3
    assert [path.name for path in NOTEBOOKS if path.stat().st_size > LARGEST] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_it_runs(name, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # a notebook says its own
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    path = FOLDER / f"{name}.ipynb"
    assert kinds(run.ran(path)) == kinds(nbformat.read(path, as_version=4))
