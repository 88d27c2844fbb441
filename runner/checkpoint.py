"""Shows, verifies and removes the checkpoints of a run.

    python -m runner.checkpoint list WORKDIR             one line for each
    python -m runner.checkpoint verify WORKDIR           reads every byte; status 1 if any is wrong
    python -m runner.checkpoint show WORKDIR             arrays and notes of the newest
    python -m runner.checkpoint prune WORKDIR --keep=2   removes all but the newest two

--step   verify or show only this step
WORKDIR is the folder of a run or of its checkpoints. `prune` is refused while the run is active,
and always in a bucket.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from runner.command_line.command import run, take_flags
from runner.command_line.exit_status import FINISHED
from runner.errors import ConfigError, did_you_mean, user_errors

_STEP = flags.DEFINE_integer("step", None, "With verify and show: this step only.", 0)
_KEEP = flags.DEFINE_integer("keep", None, "With prune: how many stay.", 1)

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

import jax

from lmlib.checkpoint import Checkpoints, DamagedCheckpointError, RemovedCheckpointError, folders
from lmlib.checkpoint.manifest import read_manifest, read_notes
from lmlib.storage.bucket.copies import url_of
from lmlib.storage.local_folder import folder_to_read, shown
from lmlib.terminal.quantities import bytes_text, duration_text
from lmlib.terminal.table import columns
from runner.processes.lock import FolderLock

DAMAGED = 1  # exit status of verify


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be busy with the run
    command, directory = _parse(arguments)
    with user_errors(), Checkpoints(directory, read_only=True) as checkpoints:
        return _COMMANDS[command](checkpoints, directory)


def _list(checkpoints: Checkpoints, directory: Path) -> int:
    rows = [("step", "saved at", "size", "arrays", "metric")]
    damaged = []
    for step in checkpoints.steps():
        folder = directory / str(step)
        try:
            with folders.reading(folder):
                manifest = read_manifest(folder)
        except RemovedCheckpointError:
            continue
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            rows.append((f"{step:,}", "damaged", "", "", ""))
        else:
            metric = "" if manifest.metric is None else f"{manifest.metric:.6g}"
            size, count = bytes_text(manifest.size), f"{len(manifest.arrays):,}"
            rows.append((f"{step:,}", manifest.saved_at, size, count, metric))
    print(columns(rows) if len(rows) > 1 else f"{directory} is empty")
    for line in damaged:
        print(line)
    for folder in folders.unfinished_in(directory):
        print(f"{folder.name} is being saved or removed, or a killed run left it")
    for folder in folders.set_aside_in(directory):
        print(f"{folder.name} was damaged and set aside")
    return FINISHED


def _verify(checkpoints: Checkpoints, directory: Path) -> int:
    status, steps = FINISHED, _asked(checkpoints, directory)
    removed = 0
    for step in steps:
        began = time.perf_counter()
        try:
            with folders.reading(directory / str(step)):
                manifest = checkpoints.verify(step)
        except DamagedCheckpointError as error:
            status, verdict = DAMAGED, f"DAMAGED: {error}"
        except RemovedCheckpointError:
            removed, verdict = removed + 1, "removed by its run meanwhile"
        else:
            took = duration_text(time.perf_counter() - began)
            files = f"{len(manifest.files):,} files"
            verdict = f"sound, {bytes_text(manifest.size)} in {files} read in {took}"
        print(f"step {step:,}: {verdict}", flush=True)
    if removed == len(steps):
        raise ConfigError(
            f"the run has removed all checkpoints that were in {directory}: verify again"
        )
    return status


def _asked(checkpoints: Checkpoints, directory: Path) -> list[int]:
    """Returns the steps of all checkpoints, or the step of --step."""
    steps, step = checkpoints.steps(), _STEP.value
    if step is None and steps:
        return steps
    if step is None or step not in steps:
        at = "" if step is None else f" at step {step}; it has {steps}"
        raise ConfigError(f"{directory} has no checkpoint{at}")
    return [step]


def _show(checkpoints: Checkpoints, directory: Path) -> int:
    step = _asked(checkpoints, directory)[-1]
    folder = directory / str(step)
    with folders.reading(folder):
        manifest = read_manifest(folder)
        notes = read_notes(folder, manifest)
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
    print("\nnotes:", json.dumps(notes, indent=1))
    return FINISHED


def _prune(checkpoints: Checkpoints, directory: Path) -> int:
    if _KEEP.value is None:
        raise ConfigError("give --keep, how many of the newest checkpoints stay")
    if url_of(directory) is not None:
        raise ConfigError(
            f"{shown(directory)} is in a bucket, where prune cannot tell if a run is active: set "
            "--fdl.checkpoints.keep, so that the run removes older checkpoints"
        )
    with FolderLock(directory.parent if directory.name == "checkpoints" else directory):
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
    aside = folders.set_aside_in(directory)
    begun = folders.unfinished_in(directory)
    half = [folder for folder in begun if folder.name.endswith(folders.REMOVED)]
    for folder in [*(directory / str(step) for step in rest), *aside, *half]:
        folders.remove([folder])
        print(f"removed {folder}")
    print(f"kept {', '.join(f'{step:,}' for step in kept) or 'nothing'}")
    return FINISHED


_COMMANDS = {"list": _list, "verify": _verify, "show": _show, "prune": _prune}


def _parse(arguments: Sequence[str]) -> tuple[str, Path]:
    """Returns the command and the folder of checkpoints."""
    if len(arguments) != 2:
        raise ConfigError("give a command and a workdir, as in: list WORKDIR; see --help")
    command = arguments[0]
    with user_errors():
        workdir = folder_to_read(arguments[1])
    if command not in _COMMANDS:
        raise ConfigError(f"unknown command {command!r}. {did_you_mean(command, _COMMANDS)}")
    for directory in (workdir / "checkpoints", workdir):
        if directory.is_dir():
            return command, directory
    raise ConfigError(f"{workdir} is not a folder")


if __name__ == "__main__":
    run(main)
