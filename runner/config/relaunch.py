"""The command that launches a run's config again: in another folder, with one change."""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import fiddle as fdl

from lmlib.experiment import Experiment
from runner.config.saved_config import modules_to_trust
from runner.config.text import parameters


def relaunch_command(cfg: fdl.Config[Experiment], workdir: Path) -> str:
    """A command to paste, from the same folder, after a run of `cfg` in `workdir`.

    Modules that a saved config may not name unasked are trusted by name, and found where this
    process found them.
    """
    trusted = modules_to_trust(cfg)
    words = [
        "python" if shutil.which("python") == sys.executable else sys.executable,
        *("-m", "runner", f"--fdl_config={workdir / 'config.json'}"),
        *(f"--trust_module={module}" for module in trusted),
        f"--workdir={workdir}_next",
        _change(cfg),
    ]
    folders = dict.fromkeys(folder for module in trusted for folder in _import_folders(module))
    if folders:
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        kept = dict.fromkeys([*folders, *(other for other in others if other)])
        words[:0] = ["env", f"PYTHONPATH={os.pathsep.join(kept)}"]
    return shlex.join(words)


def _change(cfg: fdl.Config[Experiment]) -> str:
    """A third of the learning rate; another seed where there is none."""
    optimizer = cfg.optimizer
    if isinstance(optimizer, fdl.Buildable) and "peak_lr" in parameters(optimizer):
        peak_lr = getattr(optimizer, "peak_lr", None)
        if isinstance(peak_lr, float):
            return f"--fdl.optimizer.peak_lr={peak_lr / 3:.0e}".replace("e-0", "e-")
    return f"--fdl.seed={cfg.seed + 1}"


def _import_folders(module: str) -> list[str]:
    """The folder from which `module` is imported; none if any process started here finds it."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    if file is None:
        return []
    top = Path(file).resolve()
    folder = top.parents[1] if top.name == "__init__.py" else top.parent
    found_anyway = {Path.cwd(), *(Path(path).resolve() for path in sysconfig.get_paths().values())}
    return [] if folder in found_anyway else [str(folder)]
