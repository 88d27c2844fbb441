"""Shows, verifies and removes the checkpoints of a run.

    python -m runner.checkpoint list WORKDIR             one line for each
    python -m runner.checkpoint verify WORKDIR           reads every byte; status 1 if any is wrong
    python -m runner.checkpoint show WORKDIR             arrays and notes of the newest
    python -m runner.checkpoint prune WORKDIR --keep=2   removes all but the newest two

--step   verify or show this one only
WORKDIR is the folder of a run or of its checkpoints. While the run goes on, `prune` is refused.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from lmlib.checkpoint import Checkpoints, DamagedCheckpointError, folders
from lmlib.checkpoint.manifest import read_manifest
from lmlib.checkpoint.notes import read_notes
from lmlib.local_folder import local_folder
from lmlib.quantities import bytes_text, duration_text
from lmlib.table import columns
from runner.command_line.command import run
from runner.command_line.errors import ConfigError, did_you_mean, user_errors
from runner.processes.endings import FINISHED
from runner.processes.lock import WorkdirLock

DAMAGED = 1  # exit status of verify

_STEP = flags.DEFINE_integer("step", None, "With verify and show: this step only.", lower_bound=0)
_KEEP = flags.DEFINE_integer("keep", None, "With prune: how many stay.", lower_bound=1)


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be busy with the run
    command, directory = _parse(arguments)
    with user_errors(), Checkpoints(directory, read_only=True) as checkpoints:
        return _COMMANDS[command](checkpoints, directory)


def _list(checkpoints: Checkpoints, directory: Path) -> int:
    rows = [("step", "saved at", "size", "arrays", "metric")]
    damaged = []
    for step in checkpoints.steps():
        try:
            manifest = read_manifest(directory / str(step))
        except DamagedCheckpointError as error:
            if _is_gone(directory, step):
                continue
            damaged.append(str(error))
            rows.append((f"{step:,}", "damaged", "", "", ""))
        else:
            metric = "" if manifest.metric is None else f"{manifest.metric:.6g}"
            size, count = bytes_text(manifest.size), f"{len(manifest.arrays):,}"
            rows.append((f"{step:,}", manifest.saved_at, size, count, metric))
    print(columns(rows) if len(rows) > 1 else f"{directory} holds no checkpoint")
    for line in damaged:
        print(line)
    for folder in folders.unfinished_in(directory):
        print(f"{folder.name} is being saved or removed, or a killed run left it")
    for folder in folders.set_aside_in(directory):
        print(f"{folder.name} was damaged and set aside")
    return FINISHED


def _verify(checkpoints: Checkpoints, directory: Path) -> int:
    steps = [_STEP.value] if _STEP.value is not None else checkpoints.steps()
    if not steps:
        raise ConfigError(f"{directory} holds no checkpoint")
    failed: dict[int, Exception] = {}
    for step in steps:
        began = time.perf_counter()
        try:
            manifest = checkpoints.verify(step)
        except (ValueError, FileNotFoundError) as error:
            failed[step] = error
        else:
            took = duration_text(time.perf_counter() - began)
            size = bytes_text(manifest.size)
            print(f"step {step:,}: sound, {size} in {len(manifest.files):,} files read in {took}")
    status = FINISHED
    # Told at the end: by then what a run that goes on was just removing is gone.
    for step, failure in failed.items():
        if _STEP.value is None and _is_gone(directory, step):
            continue
        if not isinstance(failure, DamagedCheckpointError):
            raise failure
        print(f"step {step:,}: DAMAGED: {failure}")
        status = DAMAGED
    return status


def _is_gone(directory: Path, step: int) -> bool:
    """Whether a run that goes on has meanwhile removed the checkpoint, as its retention asks."""
    return not (directory / str(step)).exists()


def _show(checkpoints: Checkpoints, directory: Path) -> int:
    step = checkpoints.newest() if _STEP.value is None else _STEP.value
    if step is None or step not in checkpoints.steps():
        wanted = "no checkpoint" if step is None else f"no checkpoint at step {step}"
        raise ConfigError(f"{directory} holds {wanted}; it has {checkpoints.steps() or 'none'}")
    folder = directory / str(step)
    manifest = read_manifest(folder)
    sizes = dict.fromkeys(manifest.arrays, 0)
    for name, file in manifest.files.items():
        item, _, rest = name.partition("/")
        array = rest.partition("/")[0]
        if item == "state" and array in sizes and not name.endswith("/.zarray"):
            sizes[array] += file.size
    rows = [("array", "dtype", "shape", "size")]
    rows += [
        (name, array.dtype, " × ".join(map(str, array.shape)) or "scalar", bytes_text(sizes[name]))
        for name, array in manifest.arrays.items()
    ]
    metric = "" if manifest.metric is None else f", metric {manifest.metric:.6g}"
    print(f"step {step:,}, saved at {manifest.saved_at}, {bytes_text(manifest.size)}{metric}\n")
    print(columns(rows))
    print("\nnotes:", json.dumps(read_notes(folder, manifest), indent=1))
    return FINISHED


def _prune(checkpoints: Checkpoints, directory: Path) -> int:
    if _KEEP.value is None:
        raise ConfigError("give --keep, how many of the newest checkpoints stay")
    with WorkdirLock(directory.parent if directory.name == "checkpoints" else directory):
        return _remove_all_but(_KEEP.value, checkpoints, directory)


def _remove_all_but(keep: int, checkpoints: Checkpoints, directory: Path) -> int:
    steps = checkpoints.steps()
    kept, rest = steps[-keep:], steps[:-keep]
    sound = checkpoints.newest_sound() if rest else None
    if sound in rest:
        enough = len(steps) - steps.index(sound)
        raise ConfigError(
            f"step {sound} is the newest sound checkpoint, and --keep={keep} would remove "
            f"it: all newer ones are damaged; keep at least {enough}"
        )
    for folder in [directory / str(step) for step in rest] + folders.set_aside_in(directory):
        folders.remove(folder)
        print(f"removed {folder}")
    print(f"kept {', '.join(f'{step:,}' for step in kept) or 'nothing, for there is none'}")
    return FINISHED


_COMMANDS = {"list": _list, "verify": _verify, "show": _show, "prune": _prune}


def _parse(arguments: Sequence[str]) -> tuple[str, Path]:
    """The command, and the folder of checkpoints."""
    if len(arguments) != 2:
        raise ConfigError("give a command and a workdir, as in: list WORKDIR; see --help")
    command = arguments[0]
    with user_errors():
        workdir = local_folder(arguments[1])
    if command not in _COMMANDS:
        raise ConfigError(f"unknown command {command!r}. {did_you_mean(command, _COMMANDS)}")
    for directory in (workdir / "checkpoints", workdir):
        if directory.is_dir():
            return command, directory
    raise ConfigError(f"{workdir} is no folder")


if __name__ == "__main__":
    run(main)
