"""The checkpoints in one directory: saving, choosing, verifying, restoring.

`orbax.checkpoint.CheckpointManager` saves, not the newer `orbax.checkpoint.v1`, whose interface is
still moving. The manifest is written between Orbax's last file of a step and the
renaming that makes the step visible, so a step without one is no half-written step but a damaged
one. Steps are restored from their verified files alone, without Orbax.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from lmlib.checkpoint import arrays as saved
from lmlib.checkpoint import folders, orbax_internals, removal, writing
from lmlib.checkpoint import notes as saved_notes
from lmlib.checkpoint.failures import named_errors
from lmlib.checkpoint.in_bucket.steps import steps_at
from lmlib.checkpoint.in_bucket.uploads import Uploads
from lmlib.checkpoint.manager import open_manager
from lmlib.checkpoint.manifest import (
    DamagedCheckpointError,
    Manifest,
    check_digests,
    check_names_and_sizes,
    read_manifest,
    rewrite_metric,
)
from lmlib.checkpoint.processes import agreed, barrier, random_text
from lmlib.checkpoint.reading import read_arrays
from lmlib.checkpoint.restored import Restored
from lmlib.checkpoint.retention import Retention
from lmlib.storage.bucket.copies import shown
from lmlib.storage.local_folder import folder_named
from lmlib.storage.whole_file import make_folder


class Checkpoints:
    """The checkpoints in one directory, on a file system that every process reaches.

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
        """Opens `directory`, made if absent; deletes what a kill has left unfinished there.

        `gs://…` and `s3://…` are directories as well (docs/buckets.md).

        Args:
          keep: the newest so many stay; the rest go whenever another one is whole.
          keep_every: checkpoints at multiples of so many steps stay too.
          keep_best: so many that `rank` gave the smallest metric stay too.
          keep_steps: these stay too.
          read_only: changes nothing; for reading while a run may be saving.
          save_seconds: limit of the processes' wait for each other in a save.
          check: called before anything is written, named or removed there, perhaps in another
            thread. What it raises, as where the directory is another run's now, prevents that; the
            same method raises it, or the next `wait`.

        Raises:
          ValueError: if a number is out of range, or the directory is a URL of another kind.
          OSError: if the directory cannot be made or read, naming it and the cause.
        """
        self._directory = folder_named(directory).absolute()
        self._retention = Retention(keep, keep_every, keep_best, keep_steps)
        self._in_bucket = steps_at(self._directory, check)
        self._manager: orbax_internals.ManagerOfOneFolder | Uploads | None = None
        self._saving: int | None = None  # the step that was begun last
        # Of that step: each process digests the chunks it wrote; process 0 writes the manifest.
        self._digest: Callable[[Path], None] = lambda folder: None
        self._finish: Callable[[], None] = lambda: None
        self._save_seconds = save_seconds
        self._check = check
        orbax_internals.silence()
        if read_only:
            return
        with named_errors("open the checkpoints", self._directory):
            self._check()
            if jax.process_index() == 0:
                if self._in_bucket is None:
                    make_folder(self._directory)
                    removal.finish(self._directory)
                else:
                    self._in_bucket.take()
            # In the name of what is saved, so that no other run, which was asleep in the middle of
            # a save say, writes into it. The processes wait for each other here.
            self._opening = random_text()
            if keep_best:
                self._retention.read_ranks(self._directory)
            self._manager = self._open()

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

        An earlier save that still runs is waited for first. The saving itself may fail later: the
        next `save`, `wait` or `close` raises what went wrong. A process that is alone makes a
        directory that was deleted meanwhile again, and not one that was moved: it may come back.

        Args:
          step: larger than that of every checkpoint in the directory.
          state: every leaf an array of at least one element, typed PRNG keys included.
          notes: what JSON can hold, the same on every process; copied.
          hold: an earlier step that stays, whatever is kept otherwise, until a save holds another
            or none.
          beforehand: what must be done, as for other files to be on the disk, before the checkpoint
            is whole. Called on process 0 in another thread; the save fails if it raises.

        Returns:
          The seconds for which it blocked, the wait for an earlier save included.

        Raises:
          ValueError: if `step` is not new, or something cannot be saved.
          OSError: if the directory cannot be written, naming it and the cause.
        """
        began = time.perf_counter()
        self.wait()
        if self._manager is None:
            raise ValueError(
                f"{shown(self._directory)} was opened read-only: nothing can be saved there"
            )
        newest = self._manager.latest_step()
        if newest is not None and step <= newest:
            raise ValueError(
                f"cannot save step {step}: {shown(self._directory)} already holds step {newest}; "
                "resume from that one or use another directory"
            )
        arrays = saved.named_leaves(state)
        saved.check_savable(arrays)
        notes = saved_notes.copied(notes)
        self._saving, self._retention.held = step, hold
        if isinstance(self._manager, Uploads):
            self._manager.save(step, arrays, notes, beforehand)
            return time.perf_counter() - began
        folder = folders.unfinished_folder(self._directory, step, self._opening)
        self._digest, self._finish = writing.around_the_manifest(
            folder, step, arrays, beforehand, self._check
        )
        items = ocp.args.Composite(state=writing.ArraysSave(arrays), notes=ocp.args.JsonSave(notes))
        with self._recovery(f"save step {step}"):
            if self.deleted:
                self._reopen()
            if not self._directory.is_dir():  # Orbax would make it again, without the others
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._manager.save(step, args=items, force=True)  # force: the caller says when
        return time.perf_counter() - began

    def rank(self, step: int, metric: float) -> None:
        """Ranks a step for `keep_best`, smaller is better, once a save that still runs is whole.

        Raises OSError as `save` does. A step whose save failed is left alone.
        """
        self.wait()
        with named_errors(f"rank step {step}", self._directory):
            if not self._retention.rank(step, metric) or jax.process_index() != 0:
                return
            folder = self._directory / str(step)
            if not folders.is_there(folder):
                return
            if self._in_bucket is not None:
                return self._in_bucket.rank(str(step), metric)
            unfinished = folders.unfinished_folder(self._directory, step, "ranked")
            rewrite_metric(folder, unfinished, metric, self._check)

    @property
    def deleted(self) -> bool:
        """Whether the directory was deleted since this process, which is alone, opened it."""
        return jax.process_count() == 1 and self._manager is not None and self._manager.is_deleted

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, in order; what a killed save left is not among them.

        Read from the directory, since Orbax's own list has the step that is still being saved.
        """
        return folders.steps_in(self._directory)

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, or `None`; it may be damaged."""
        return max(self.steps(), default=None)

    def newest_sound(self) -> int | None:
        """The step of the newest whole checkpoint that `verify` finds nothing wrong with."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedCheckpointError, removal.RemovedCheckpointError):
                self.verify(step)
                return step
        return None

    def verify(self, step: int) -> Manifest:
        """Reads every file of a checkpoint and compares it with what was saved.

        The processes share the reading, and all raise if one of them finds damage.

        Raises:
          DamagedCheckpointError: naming the checkpoint and the first wrong file.
          RemovedCheckpointError: if it is removed meanwhile.
          ValueError: if there is no such checkpoint.
        """
        folder = self._folder(step)
        manifest = agreed(folder, lambda: read_manifest(folder))
        agreed(folder, lambda: check_names_and_sizes(folder, manifest))
        self._check_digests(folder, manifest, sorted(manifest.files))
        return manifest

    def names(self, step: int, part: str) -> set[str]:
        """The names of the arrays of a checkpoint that lie under the name `part`.

        Raises as `verify` does.
        """
        folder = self._folder(step)
        manifest = agreed(folder, lambda: read_manifest(folder))
        under = f"{part}."
        return {name.removeprefix(under) for name in manifest.arrays if name.startswith(under)}

    def fits(self, step: int, target: PyTree) -> bool:
        """Whether the arrays of a checkpoint have the names, shapes and dtypes of `target`, as
        `restore` needs; reads none of them. Raises as `verify` does."""
        folder = self._folder(step)
        manifest = agreed(folder, lambda: read_manifest(folder))
        try:
            saved.check_target(manifest, saved.named_leaves(target))
        except ValueError:
            return False
        return True

    def restore(self, step: int, target: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The state saved at `step`, laid out as `target` says, and its `notes`; all verified.

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
        """As `restore`, but of the state only what lies under the name `part`, such as "model".

        Args:
          target: what the state's tree has there.
        """
        return self._restore(step, target, part=f"{part}.")

    def restore_newest(self, target: PyTree, *, fallback: bool = True) -> Restored | None:
        """The newest sound checkpoint, restored as by `restore`; `None` if there is none at all.

        Damaged ones that are newer are set aside, unless this is read-only; the caller should say
        so, loudly: `Restored.damaged` has the reasons.

        Args:
          fallback: whether to go back past a damaged checkpoint rather than raise.

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
            if self._manager is not None:
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
                self._check()
                if self._in_bucket is None:
                    folders.set_aside(error.folder)
                else:
                    name = error.folder.name
                    self._in_bucket.set_aside(name, name + folders.SET_ASIDE)
        barrier("damaged checkpoints set aside")
        self._reopen()

    def wait(self) -> None:
        """Returns when the save that was begun last is whole.

        Raises:
          OSError: if the storage failed, naming the directory and the cause; the checkpoints
            before stay, and what was written of this one is removed. One process of several should
            end then: the others wait for it, up to `save_seconds`.
        """
        if self._manager is not None:
            with self._recovery(f"save step {self._saving}"):
                self._manager.wait_until_finished()
            self._check()

    def close(self) -> None:
        """Waits, then ends Orbax's threads; no other method works afterwards."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Closes; but of several processes one that has failed waits for nothing more."""
        if kind is None or jax.process_count() == 1:
            self.close()

    def _open(self) -> orbax_internals.ManagerOfOneFolder | Uploads:
        if self._in_bucket is not None:
            return Uploads(
                self._directory,
                self._in_bucket,
                self._opening,
                self._remove_old,
                self._save_seconds,
            )
        return open_manager(
            self._directory,
            self._opening,
            lambda folder: self._digest(folder),
            lambda: self._finish(),
            self._remove_old,
            self._save_seconds,
        )

    def _remove_old(self, directory: Path) -> None:
        """Removes the checkpoints that need not stay, on process 0."""
        old = self._retention.outdated(folders.steps_in(directory))
        if self._in_bucket is None:
            removal.remove([directory / str(step) for step in old], self._check)
        else:
            self._in_bucket.remove(map(str, old))

    def _restore(self, step: int, target: PyTree, part: str) -> tuple[PyTree, dict[str, Any]]:
        folder = self._folder(step)
        wanted = {f"{part}{name}": leaf for name, leaf in saved.named_leaves(target).items()}
        # The target first: it is refused at once, and not after gigabytes were read.
        manifest = agreed(folder, lambda: read_manifest(folder))
        manifest_of_part = saved.part_of(manifest, part)
        saved.check_target(manifest_of_part, wanted)
        agreed(folder, lambda: check_names_and_sizes(folder, manifest))
        others = [file for file in sorted(manifest.files) if not saved.is_chunk(file, wanted)]
        self._check_digests(folder, manifest, others)
        chunks = agreed(folder, lambda: saved.check_layout(folder, manifest_of_part, wanted))
        notes = agreed(folder, lambda: saved_notes.read_notes(folder, manifest))
        restored = agreed(folder, lambda: read_arrays(folder, manifest, wanted, chunks))
        leaves = [restored[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(target), leaves), notes

    def _check_digests(self, folder: Path, manifest: Manifest, files: Sequence[str]) -> None:
        """Each process reads a share of the files; all raise if one of them finds damage."""
        share = files[jax.process_index() :: jax.process_count()]
        agreed(folder, lambda: check_digests(folder, manifest, share))

    def _folder(self, step: int) -> Path:
        if step not in self.steps():
            raise ValueError(
                f"{shown(self._directory)} has no whole checkpoint at step {step}; "
                f"it has {self.steps() or 'none'}"
            )
        return self._directory / str(step)

    def _reopen(self) -> None:
        """Orbax's list of steps, read again; of a directory that was deleted an empty one."""
        assert self._manager is not None
        if self.deleted:
            self._check()
            folders.make_again(self._directory)
        self._manager.close()
        self._manager = self._open()

    @contextlib.contextmanager
    def _recovery(self, doing: str) -> Iterator[None]:
        """After an error, the directory and Orbax are again as they were before the save.

        Not where there are other processes: they wait for this one in the middle of their save.
        """
        try:
            with named_errors(doing, self._directory):
                yield
        except Exception:
            self._check()
            if jax.process_count() == 1:
                with contextlib.suppress(OSError):
                    if self._in_bucket is None:
                        removal.finish(self._directory)
                    else:
                        self._in_bucket.finish()
                with contextlib.suppress(Exception):  # it may raise the same error again
                    self._reopen()
            raise
