"""Printed commands, ready to paste into a shell."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def python_command(module: str, *arguments: str | os.PathLike[str]) -> str:
    """Returns `python -m module arguments`, quoted for a shell.

    Begins with the path of the running interpreter if `python` would start another one or none, as
    in a virtual environment that is used but not activated. Two environments may link to one
    interpreter; their folders distinguish them.
    """
    found, python = shutil.which("python"), sys.executable or "python"
    if found is not None and sys.executable:
        theirs, ours = Path(found), Path(sys.executable)
        if theirs.parent.resolve() == ours.parent.resolve() and theirs.samefile(ours):
            python = "python"
    return shlex.join([python, "-m", module, *(os.fspath(each) for each in arguments)])
