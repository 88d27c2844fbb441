"""Printed commands, ready to paste into a shell."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def python_command(module: str, *arguments: str | os.PathLike[str]) -> str:
    """Returns `python -m module arguments`, quoted for a shell.

    Begins with the path of the running interpreter if `python` would start another one or none, as
    in a virtual environment that is not activated.
    """
    found, python = shutil.which("python"), sys.executable or "python"
    # Two environments may link to one interpreter; their folders distinguish them.
    folders = {Path(each).parent.resolve() for each in (found or "", python)}
    if found and len(folders) == 1 and Path(found).samefile(python):
        python = "python"
    return shlex.join([python, "-m", module, *(os.fspath(each) for each in arguments)])
