"""Suggested commands after a run: generate text, or train again with one change."""

import os
import re
import shlex
import sys
import sysconfig
from pathlib import Path

import fiddle as fdl

from lmlib.experiment import Experiment
from lmlib.storage.local_folder import shown
from lmlib.terminal.python_command import python_command
from runner.config.saved_config import modules_to_trust
from runner.config.text import parameters


def next_commands(cfg: fdl.Config[Experiment], workdir: Path) -> list[str]:
    """Returns commands to try after a run of `cfg` in `workdir`, to paste in the same folder."""
    commands = [relaunch_command(cfg, workdir)]
    if cfg.samples.prompts:
        commands.insert(0, generate_command(cfg, workdir))
    return commands


def relaunch_command(cfg: fdl.Config[Experiment], workdir: Path) -> str:
    """Returns a command that trains the run's config in another folder, with one change."""
    config = f"--fdl_config={shown(workdir)}/config.json"
    trusted = modules_to_trust(cfg)
    flags = (config, *_trusting(trusted), f"--workdir={shown(workdir)}_next", _change(cfg))
    devices = re.findall(
        r"--xla_force_host_platform_device_count=\d+", os.environ.get("XLA_FLAGS", "")
    )  # the mesh needs these simulated devices
    variables = [*_import_path(trusted), *(f"XLA_FLAGS={flag}" for flag in devices[-1:])]
    return _with(variables, python_command("runner", *flags))


def generate_command(cfg: fdl.Config[Experiment], workdir: Path) -> str:
    """Returns a command that continues the first of the run's prompts."""
    trusted = modules_to_trust(cfg)
    flags = (f"--from={shown(workdir)}", *_trusting(trusted), f"--prompt={cfg.samples.prompts[0]}")
    return _with(_import_path(trusted), python_command("runner.generate", *flags))


def _trusting(modules: list[str]) -> list[str]:
    """Returns flags that trust the modules outside the default list."""
    return [f"--trust_module={module}" for module in modules]


def _with(variables: list[str], command: str) -> str:
    """Prefixes `command` with environment variables, each NAME=VALUE."""
    return shlex.join(["env", *variables]) + f" {command}" if variables else command


def _import_path(modules: list[str]) -> list[str]:
    """Returns PYTHONPATH=… with the folders from which this process imported `modules`."""
    folders = dict.fromkeys(folder for module in modules for folder in _import_folders(module))
    if not folders:
        return []
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = dict.fromkeys([*folders, *(other for other in others if other)])
    return [f"PYTHONPATH={os.pathsep.join(kept)}"]


def _change(cfg: fdl.Config[Experiment]) -> str:
    """Returns an override: a third of the learning rate, or another seed without one."""
    optimizer = cfg.optimizer
    if isinstance(optimizer, fdl.Buildable) and "peak_lr" in parameters(optimizer):
        peak_lr = getattr(optimizer, "peak_lr", None)
        if isinstance(peak_lr, float):
            return f"--fdl.optimizer.peak_lr={peak_lr / 3:.0e}".replace("e-0", "e-")
    return f"--fdl.seed={cfg.seed + 1}"


def _import_folders(module: str) -> list[str]:
    """Returns the folder of `module`; empty if a new process would find it anyway."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    if file is None:
        return []
    top = Path(file).resolve()
    folder = top.parents[1] if top.name == "__init__.py" else top.parent
    found_anyway = {Path.cwd(), *(Path(path).resolve() for path in sysconfig.get_paths().values())}
    return [] if folder in found_anyway else [str(folder)]
