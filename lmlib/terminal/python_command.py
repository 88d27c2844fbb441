"""Commands that are printed to be pasted into a shell."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def python_command(module: str, *arguments: str | os.PathLike[str]) -> str:
    """`python -m module arguments`, quoted for a shell.

    Begins with the running interpreter's path where `python` would start another one or none, as in
    a virtual environment that is used and not activated.
    """
    return shlex.join([_interpreter(), "-m", module, *(os.fspath(each) for each in arguments)])


def _interpreter() -> str:
    """Two virtual environments may link to one file: the folder tells them apart."""
    found = shutil.which("python")
    if found is None or not sys.executable:
        return sys.executable or "python"
    theirs, ours = Path(found), Path(sys.executable)
    same = theirs.parent.resolve() == ours.parent.resolve() and theirs.samefile(ours)
    return "python" if same else sys.executable
