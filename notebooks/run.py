"""Runs notebooks and stores their output in them.

    python notebooks/run.py [notebooks/NAME.ipynb …]     all notebooks by default

Install the requirements with `pip install -e '.[notebooks]'`.
"""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SECONDS = 900  # timeout of a cell
_FOLDER = re.compile(r"/tmp/tmp\w+")  # temporary folders, which differ each time


def ran(found: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Runs all cells of the notebook in order in a new kernel, and returns the same notebook.

    Output on stderr, which is mostly progress, is removed.

    Raises:
      nbclient.exceptions.CellExecutionError: with the traceback of a cell that fails.
    """
    folder = {"metadata": {"path": str(HERE.parent)}}
    NotebookClient(found, timeout=SECONDS, kernel_name="python3", resources=folder).execute()
    for cell in found.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            for output in cell.outputs:
                if "text" in output:
                    output.text = _anywhere(output.text)
    return found


def _anywhere(text: str) -> str:
    """Returns `text` without the paths of this machine."""
    text = text.replace(sys.executable, "python").replace(str(Path.home()), "~")
    return _FOLDER.sub("/tmp/work", text)


def main(names: list[str]) -> None:
    for notebook in map(Path, names) if names else sorted(HERE.glob("*.ipynb")):
        nbformat.write(ran(nbformat.read(notebook, as_version=4)), notebook)
        print(f"{notebook}: {notebook.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
