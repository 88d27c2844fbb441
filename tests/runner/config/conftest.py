"""An experiment in a file of its own."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from written_experiment import EXPERIMENT, LIBRARY

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path, monkeypatch) -> Iterator[Write]:
    """Writes a module into a folder on the Python path; its import is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(source.lstrip("\n"), encoding="utf-8")
        importlib.invalidate_caches()
        return path

    yield write
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def experiment(write) -> str:
    write("library", LIBRARY)
    return str(write("mine", EXPERIMENT))
