"""Captures skipped updates, so that `python -m runner.replay CAPTURE` can repeat them.

A capture is a folder `workdir/captures/<step>`:

    capture.json     the step, its line of metrics.jsonl, the mesh, JAX's settings
    config.json      the run's config
    batch.npz        the batch of the step, all rows
    checkpoints/     the newest checkpoint from before the step, its files linked rather than copied

A replay repeats the steps from that checkpoint to the captured step. The state right before the
step cannot be saved: its buffers are donated to the next state before the metrics are known.
"""

import dataclasses
import itertools
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from lmlib.checkpoint.folders import steps_in
from lmlib.data.batch import Batch, Source
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stages import Continued
from lmlib.metrics.log import from_json, to_json
from lmlib.row_order import places
from lmlib.storage.atomic_file import make_folder, sync, sync_folders, write_atomically
from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked
from lmlib.terminal.python_command import python_command
from runner.errors import error_text
from runner.jax_settings.numbers import settings_of_numbers
from runner.processes.agreement import from_first
from runner.training.run import Line, Run
from runner.training.saving import Saver

FOLDER = "captures"
_FIELDS = tuple(one.name for one in dataclasses.fields(Batch) if not one.metadata.get("static"))


class Captures:
    """Captures the first of consecutive skipped updates, up to `guard.captures` times per run."""

    def __init__(self, run: Run, saver: Saver, initialised_from: str | None):
        """Prepares captures of a run that began with the weights `initialised_from`, if any."""
        self._run, self._saver, self._initialised_from = run, saver, initialised_from

    def take(self, line: Line, batch: Batch) -> str | None:
        """Captures the step of `line` if its update was skipped; every process must call it."""
        step = line["step"]
        if line["skipped_in_a_row"] != 1 or line["valid_tokens"] == 0:
            return None
        folder = self._run.workdir / FOLDER
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        taken = [name for name in names if name.isdecimal()]  # skips leftovers of killed processes
        has_room = str(step) not in taken and len(taken) < self._run.experiment.guard.captures
        if not from_first(has_room):
            return None
        self._saver.settle()  # so that no checkpoint is removed while its files are linked
        stands_S = np.argsort(_row_places(batch))
        rows = {
            name: _whole(field)[:, stands_S]
            for name in _FIELDS
            if (field := getattr(batch, name)) is not None
        }
        folder /= str(step)
        self._run.lock.check()
        if self._run.primary:
            try:
                self._write(folder, line, rows)
            except OSError as error:
                return f"WARNING: step {step:,} is not captured in {folder}: {error_text(error)}"
        again = python_command("runner.replay", folder)
        return f"step {step:,} was skipped; to replay it: {again}"

    def _write(self, folder: Path, line: Line, rows: dict[str, np.ndarray]) -> None:
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            make_folder(unfinished)
            checkpoints = steps_in(self._run.workdir / "checkpoints")
            earlier = [step for step in checkpoints if step < line["step"]]
            if earlier:
                name = f"checkpoints/{earlier[-1]}"
                shutil.copytree(
                    self._run.workdir / name, unfinished / name, copy_function=_link_or_copy
                )
            np.savez(unfinished / "batch.npz", **cast(Any, rows))
            shutil.copy2(self._run.workdir / "config.json", unfinished / "config.json")
            experiment, step = self._run.experiment, line["step"] - 1
            present = {name: value for name, value in line.items() if value is not None}
            facts = {
                "step": line["step"],
                "line": json.loads(to_json(present)),
                "mesh": dict(experiment.mesh.shape),
                "initialised_from": self._initialised_from,
                "jax_settings": settings_of_numbers(),
                "sequences": _sequences(experiment.at(step).data, step),
            }
            for name in ("batch.npz", "config.json"):  # checkpoint files are synced already
                sync(unfinished / name)
            sync_folders(unfinished)
            write_atomically(unfinished / "capture.json", json.dumps(facts, indent=1) + "\n")
            self._run.lock.check()
            unfinished.rename(folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Capture:
    """A capture that was read from disk."""

    folder: Path
    step: int
    line: Line
    mesh: dict[str, int]
    initialised_from: str | None
    jax_settings: dict[str, str]


def read_capture(folder: Path) -> Capture:
    """Reads a capture; raises ValueError or OSError if `folder` has none or it is damaged."""
    file = folder / "capture.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not a capture: it has no capture.json; see workdir/captures")
    try:
        facts = read_json(unlinked(folder, file.name))
        step, line = facts["step"], from_json(json.dumps(facts["line"]))
        names = "mesh", "initialised_from", "jax_settings"
        mesh, origin, settings = (facts[name] for name in names)
        sound = {
            "step": type(step) is int and 0 < step == line["step"],
            "line": all(type(value) in (int, float) for value in line.values()),
            "mesh": all(type(size) is int and size > 0 for size in mesh.values()),
            "initialised_from": origin is None or isinstance(origin, str),
            "jax_settings": all(isinstance(value, str) for value in settings.values()),
        }
        if wrong := [name for name, is_sound in sound.items() if not is_sound]:
            raise ValueError(f"{wrong[0]} {facts[wrong[0]]!r:.80}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from error
    return Capture(folder, step, line, mesh, origin, settings)


def read_batch(folder: Path, expected: Batch) -> Batch:
    """Returns the captured batch, with its tokens in the order of `expected`.

    Raises ValueError, before it allocates memory, unless the arrays have the shapes of `expected`.
    """
    file = folder / "batch.npz"
    shapes = {
        name: field.shape for name in _FIELDS if (field := getattr(expected, name)) is not None
    }
    try:
        with zipfile.ZipFile(file) as parts:
            for name, shape in shapes.items():
                with parts.open(f"{name}.npy") as part:
                    np.lib.format.read_magic(part)
                    saved, _, dtype = np.lib.format.read_array_header_1_0(part)
                if saved != shape or dtype.hasobject:
                    raise ValueError(f"{name} is {dtype}{list(saved)}, not {list(shape)}")
        with np.load(file, allow_pickle=False) as arrays:
            order_S = _row_places(expected)
            found = {name: arrays[name][:, order_S] for name in shapes}
        return Batch(**found, order=expected.order, whole_rows=expected.whole_rows)
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} holds no batch of {expected.tokens.shape}: {error}") from error


def _sequences(source: Source, step: int) -> list[int] | None:
    """Returns the index of the stored sequence in each row of a batch; `None` if unknown."""
    if isinstance(source, Continued):
        found = [(_sequences(source.source, own), rows) for own, rows in source.parts(step)]
        known = [each[rows] for each, rows in found if each is not None]
        return list(itertools.chain(*known)) if len(known) == len(found) else None
    return source.sequence_numbers(step).tolist() if isinstance(source, FlatTokens) else None


def _row_places(batch: Batch) -> np.ndarray:
    """Returns the position in its row of each token of a placed batch, which may be abstract."""
    shape, field = batch.tokens.shape, cast(jax.Array, batch.tokens)
    return places(shape[1], shape[1] // field.sharding.shard_shape(shape)[1], batch.order)


def _whole(array: jax.Array) -> np.ndarray:
    """Gathers an array with all its rows on every process."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _link_or_copy(source: str, target: str) -> None:
    """Hard-links a file, which remains after the original is removed, or else copies it."""
    try:
        os.link(source, target)
    except OSError:  # the file system doesn't support hard links
        shutil.copy2(source, target)
