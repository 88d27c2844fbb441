"""The checkpoints in one directory: saving, choosing, verifying, restoring.

The manifest is written last, before the step becomes visible. A step without one is therefore
damaged, not half-written.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from lmlib.checkpoint import arrays as saved
from lmlib.checkpoint import folders
from lmlib.checkpoint.failures import DamagedCheckpointError, RemovedCheckpointError, named_errors
from lmlib.checkpoint.in_bucket.uploads import WrittenStepsInBucket
from lmlib.checkpoint.manifest import (
    Manifest,
    check_digests,
    check_names_and_sizes,
    copied_notes,
    read_manifest,
    read_notes,
)
from lmlib.checkpoint.on_disk import StepsOnDisk, silence
from lmlib.checkpoint.processes import agreed, barrier, random_text
from lmlib.checkpoint.retention import Retention
from lmlib.checkpoint.saves import begin_save
from lmlib.storage.bucket.copies import url_of
from lmlib.storage.local_folder import folder_named, shown


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `restore_newest`.

    Attributes:
      step: the step of the newest sound checkpoint.
      state: laid out like the target.
      notes: its notes.
      damaged: an error for each newer checkpoint, newest first.
    """

    step: int
    state: PyTree
    notes: dict[str, Any]
    damaged: tuple[DamagedCheckpointError, ...]


class Checkpoints:
    """The checkpoints in one directory, on a file system shared by all processes.

    Every process of the run makes the same calls in the same order.

        with Checkpoints(workdir / "checkpoints") as checkpoints:
            checkpoints.save(100, state, {"tokens": 1_000_000})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: int = 0,
        keep_steps: Collection[int] = (),
        read_only: bool = False,
        save_seconds: int = 1_200,
        check: Callable[[], None] = lambda: None,
    ):
        """Opens `directory`, creating it if absent; deletes unfinished steps left by a kill.

        `gs://…` and `s3://…` are directories as well (docs/buckets.md).

        Args:
          keep: the number of newest checkpoints to keep; others are deleted once a new one is
            complete.
          keep_every: checkpoints at multiples of this number of steps are kept too.
          keep_best: the number of checkpoints with the smallest metrics, by `rank`, to keep too.
          keep_steps: steps to keep too.
          read_only: changes nothing; for reading while a run may be saving.
          save_seconds: limit on how long processes wait for each other in a save.
          check: called before anything is written, named or removed there, perhaps in another
            thread. It prevents that by raising, for example if the directory now belongs to another
            run. The calling method raises its error, or the next `wait`.

        Raises:
          ValueError: if a number is out of range, or the URL's scheme is not supported.
          OSError: if the directory cannot be made or read, naming it and the cause.
        """
        self._directory = folder_named(directory).absolute()
        self._retention = Retention(keep, keep_every, keep_best, keep_steps)
        url = url_of(self._directory)
        self._written: StepsOnDisk | WrittenStepsInBucket = (
            StepsOnDisk(self._directory, check, save_seconds)
            if url is None
            else WrittenStepsInBucket(url, check)
        )
        self._read_only = read_only
        self._saving: int | None = None  # the step of the latest save
        self._pending: Future[None] | None = None  # its save
        self._save_seconds = save_seconds
        self._check = check
        silence()
        if read_only:
            return
        with named_errors("open the checkpoints", self._directory):
            self._check()
            if jax.process_index() == 0:
                self._written.take()
            # Part of an unfinished step's name, so that no other run writes into it, such as one
            # that was suspended in a save. The processes synchronise here.
            self._opening = random_text()
            if keep_best:
                self._retention.read_ranks(self._directory)
            self._written.open()

    def save(
        self,
        step: int,
        state: PyTree,
        notes: dict[str, Any],
        hold: int | None = None,
        *,
        beforehand: Callable[[], None] = lambda: None,
    ) -> float:
        """Starts saving; returns once the arrays are copied, so `state` may be donated at once.

        Waits first for an earlier save. A failure of this one is raised by the next `save`, `wait`
        or `close`. A run of one process recreates a directory that was deleted meanwhile, but not
        one that was moved, since it may come back.

        Args:
          step: larger than every checkpoint's step in the directory.
          state: every leaf an array of at least one element, typed PRNG keys included.
          notes: a JSON-serialisable object, the same on every process; copied.
          hold: an earlier step to keep until the next save.
          beforehand: called on process 0 in another thread before the checkpoint is complete, for
            example to flush other files to the disk. The save fails if it raises.

        Returns:
          The seconds for which it blocked, including the wait for an earlier save.

        Raises:
          ValueError: if `step` is not new, or something cannot be saved.
          OSError: if the directory cannot be written, naming it and the cause.
        """
        began = time.perf_counter()
        self.wait()
        if self._read_only:
            raise ValueError(f"cannot save to {shown(self._directory)}: it was opened read-only")
        newest = self.newest()
        if newest is not None and step <= newest:
            raise ValueError(
                f"cannot save step {step}: {shown(self._directory)} already holds step {newest}; "
                "resume from that one or use another directory"
            )
        arrays = saved.named_leaves(state)
        saved.check_savable(arrays)
        notes = copied_notes(notes)
        self._saving, self._retention.held = step, hold
        with self._recovery(f"save step {step}"):
            self._pending = begin_save(
                self._written.begin(step, self._opening),
                self._directory / str(step),
                arrays,
                notes,
                beforehand,
                self._remove_old,
                self._save_seconds,
            )
        return time.perf_counter() - began

    def rank(self, step: int, metric: float) -> None:
        """Ranks a step for `keep_best`, smaller is better; waits until its save is complete.

        Raises OSError as `save` does. A step whose save failed is skipped.
        """
        self.wait()
        with named_errors(f"rank step {step}", self._directory):
            if (
                self._retention.rank(step, metric)
                and jax.process_index() == 0
                and folders.is_there(self._directory / str(step))
            ):
                self._written.rank(str(step), metric)

    @property
    def deleted(self) -> bool:
        """True if the directory was deleted since it was opened; only known with one process."""
        return jax.process_count() == 1 and self._written.is_deleted

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order."""
        return folders.steps_in(self._directory)

    def newest(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or `None`; it may be damaged."""
        return max(self.steps(), default=None)

    def newest_sound(self) -> int | None:
        """Returns the step of the newest checkpoint that passes `verify`, or `None`."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedCheckpointError, RemovedCheckpointError):
                self.verify(step)
                return step
        return None

    def verify(self, step: int) -> Manifest:
        """Reads every file of a checkpoint and compares it with its digest.

        The processes share the reading, and all raise if one of them finds damage.

        Raises:
          DamagedCheckpointError: naming the checkpoint and the first wrong file.
          RemovedCheckpointError: if it is removed meanwhile.
          ValueError: if there is no such checkpoint.
        """
        folder, manifest = self._manifest(step)
        agreed(folder, lambda: check_names_and_sizes(folder, manifest))
        self._check_digests(folder, manifest, sorted(manifest.files))
        return manifest

    def names(self, step: int, part: str) -> set[str]:
        """Returns the names of the arrays of a checkpoint below the name `part`.

        Raises as `verify` does.
        """
        _, manifest = self._manifest(step)
        under = f"{part}."
        return {name.removeprefix(under) for name in manifest.arrays if name.startswith(under)}

    def fits(self, step: int, target: PyTree) -> bool:
        """True if the arrays of a checkpoint match the names, shapes and dtypes of `target`.

        `restore` needs such a match. No array is read. Raises as `verify` does.
        """
        _, manifest = self._manifest(step)
        try:
            saved.check_target(manifest, saved.named_leaves(target))
        except ValueError:
            return False
        return True

    def restore(self, step: int, target: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Returns the state saved at `step`, laid out as `target`, and its `notes`; all verified.

        Args:
          step: one of `steps()`.
          target: the state's tree with `jax.ShapeDtypeStruct` leaves, whose shardings are on real
            devices; the mesh need not be the one that the state was saved on.

        Raises:
          DamagedCheckpointError: if a byte of it is not as it was saved.
          RemovedCheckpointError: if it is removed meanwhile.
          ValueError: if there is no such checkpoint, or its arrays do not have the names, shapes
            and dtypes of `target` (nothing is cast).
        """
        return self._restore(step, target, part="")

    def restore_part(self, step: int, part: str, target: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Restores only the part of the state below the name `part`, such as "model".

        Args:
          target: the part of the state's tree with that name, as for `restore`.
        """
        return self._restore(step, target, part=f"{part}.")

    def restore_newest(self, target: PyTree, *, fallback: bool = True) -> Restored | None:
        """Restores the newest sound checkpoint as `restore` does; `None` without checkpoints.

        Newer damaged ones are set aside, unless this is read-only. `Restored.damaged` has the
        reasons; the caller should report them prominently.

        Args:
          fallback: True falls back to an older checkpoint if one is damaged; False raises.

        Raises:
          DamagedCheckpointError: if the newest is damaged and `fallback` is off, or if all are.
          RemovedCheckpointError, ValueError: as for `restore`.
        """
        damaged: list[DamagedCheckpointError] = []
        for step in reversed(self.steps()):
            try:
                state, notes = self.restore(step, target)
            except DamagedCheckpointError as error:
                if not fallback:
                    raise
                damaged.append(error)
                continue
            if not self._read_only:
                self.set_aside(damaged)
            return Restored(step, state, notes, tuple(damaged))
        if damaged:
            damaged[0].add_note(f"None of the {len(damaged)} checkpoints there is sound.")
            raise damaged[0]
        return None

    def set_aside(self, damaged: Sequence[DamagedCheckpointError]) -> None:
        """Renames damaged steps to `<step>.damaged`, so that a run can save those steps again."""
        if not damaged:
            return
        self.wait()
        if jax.process_index() == 0:
            for error in damaged:
                name = error.folder.name
                self._written.set_aside(name, name + folders.SET_ASIDE)
        barrier("damaged checkpoints set aside")

    def wait(self) -> None:
        """Waits until the latest save is complete.

        Raises:
          OSError: if the storage failed, naming the directory and the cause. Earlier checkpoints
            stay, and the unfinished one is removed. One process of several should then exit: the
            others wait for it, up to `save_seconds`.
        """
        if self._read_only:
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._recovery(f"save step {self._saving}"):
                pending.result()
        self._check()

    def close(self) -> None:
        """Waits for the latest save; no other method works afterwards."""
        try:
            self.wait()
        finally:
            self._written.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Closes, but does not wait after an exception if there are several processes."""
        if kind is None or jax.process_count() == 1:
            self.close()

    def _remove_old(self) -> None:
        """Removes the checkpoints that are not kept, on process 0."""
        old = self._retention.outdated(self._written.complete())
        self._written.remove(map(str, old))

    def _restore(self, step: int, target: PyTree, part: str) -> tuple[PyTree, dict[str, Any]]:
        folder, manifest = self._manifest(step)
        wanted = {f"{part}{name}": leaf for name, leaf in saved.named_leaves(target).items()}
        # Check the target first, so that a mismatch fails before gigabytes are read.
        manifest_of_part = saved.part_of(manifest, part)
        saved.check_target(manifest_of_part, wanted)
        agreed(folder, lambda: check_names_and_sizes(folder, manifest))
        others = [file for file in sorted(manifest.files) if not saved.is_chunk(file, wanted)]
        self._check_digests(folder, manifest, others)
        chunks = agreed(folder, lambda: saved.check_layout(folder, manifest_of_part, wanted))
        notes = agreed(folder, lambda: read_notes(folder, manifest))
        restored = agreed(folder, lambda: saved.read_arrays(folder, manifest, wanted, chunks))
        leaves = [restored[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(target), leaves), notes

    @staticmethod
    def _check_digests(folder: Path, manifest: Manifest, files: Sequence[str]) -> None:
        """Checks digests; each process reads a share, and all raise if one of them finds damage."""
        share = files[jax.process_index() :: jax.process_count()]
        agreed(folder, lambda: check_digests(folder, manifest, share))

    def _manifest(self, step: int) -> tuple[Path, Manifest]:
        """Returns the folder and the manifest of a step; raises as `verify` does."""
        if step not in self.steps():
            raise ValueError(
                f"{shown(self._directory)} has no whole checkpoint at step {step}; "
                f"it has {self.steps() or 'none'}"
            )
        folder = self._directory / str(step)
        return folder, agreed(folder, lambda: read_manifest(folder))

    @contextlib.contextmanager
    def _recovery(self, doing: str) -> Iterator[None]:
        """Restores the directory after an error to its state before the save.

        Only in runs of one process: the others would wait for this one in the middle of their save.
        """
        try:
            with named_errors(doing, self._directory):
                yield
        except Exception:
            self._check()
            if jax.process_count() == 1:
                with contextlib.suppress(OSError):
                    self._written.remove_unfinished()
            raise
