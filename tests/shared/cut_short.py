"""Runs as they lie when they were ended before their last step, without running them once more."""

import shutil
from pathlib import Path


def cut_short(run: Path, step: int, copy: Path) -> Path:
    """A copy of a finished run, as it was after its checkpoint `step`; its newer lines stay."""
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name.isdecimal() and int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    (copy / "result.json").unlink()
    return copy
