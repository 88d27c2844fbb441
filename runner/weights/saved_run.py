"""A checkpoint of a run, and what its workdir knows besides: config, notes, where it began."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import fiddle as fdl
from jax.sharding import Mesh

from lmlib.checkpoint import RemovedCheckpointError
from lmlib.checkpoint.folders import is_there, steps_in
from lmlib.checkpoint.manifest import read_manifest
from lmlib.checkpoint.notes import read_notes
from lmlib.checkpoint.removal import reading
from lmlib.hf.families import described
from lmlib.hf.family import Family
from lmlib.hf.folder import FolderError
from lmlib.hf.hub import local_folder_of
from lmlib.hf.peft import adapters_in, holds_adapters
from lmlib.models.matrices.adapted import without_adapters
from lmlib.parallel.selection import named_weights
from lmlib.recipe import Recipe
from lmlib.state import abstract_model
from lmlib.storage.bucket.copies import shown
from lmlib.storage.local_folder import folder_to_read
from lmlib.storage.unlinked import unlinked
from runner.config import configs
from runner.config.families import known_families
from runner.config.references import HuggingFace, Saved, base_of, located
from runner.config.stages import training_data
from runner.errors import ConfigError
from runner.processes.agreement import from_first
from runner.weights.notes import WEIGHTS_ALONE, tokenizer_in
from runner.weights.texts import KnownTexts

ORIGIN = "hugging_face"  # in an imported workdir: what its folder held besides weights

_TRIES = 3  # of reading the newest checkpoint of a run that goes on
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Access:
    """How a command reads weights that are there.

    Attributes:
      trusted: modules that the config.json of a run may refer to, and whose families are known.
      init_from: where what a run began with is now, whose checkpoints do not hold all weights, or
        the base of adapters in a folder; `None`: where it was.
      average: whether the average that a run kept of its weights is read in place of them.
      show: gets a line now and then while weights are read, and what is not as it was asked for.
    """

    trusted: Collection[str] = ()
    init_from: str | None = None
    average: bool = False
    show: Callable[[str], None] = lambda line: None

    @functools.cached_property
    def families(self) -> tuple[Family, ...]:
        """Those of Hugging Face's folders that are known; raises as `known_families` does."""
        return known_families(self.trusted)


PLAIN = Access()


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A checkpoint, of which nothing but its notes is read yet.

    Attributes:
      checkpoints: the folder that it lies in.
      notes: what the run saved beside the arrays.
    """

    checkpoints: Path
    step: int
    notes: dict[str, Any]
    access: Access = PLAIN

    generation_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # which folders have

    @property
    def workdir(self) -> Path:
        return self.checkpoints.parent

    @property
    def folder(self) -> Path:
        """The checkpoint's own."""
        return self.checkpoints / str(self.step)

    @property
    def name(self) -> str:
        return f"{shown(self.workdir)}@{self.step}{', the average' * self.access.average}"

    @functools.cached_property
    def cfg(self) -> fdl.Config:
        """The run's config; raises ConfigError if there is none, or it is damaged."""
        return configs.load(str(self.workdir / "config.json"), trusted=self.access.trusted)

    @property
    def has_config(self) -> bool:
        return (self.workdir / "config.json").is_file()

    @functools.cached_property
    def texts(self) -> KnownTexts:
        origin, noted = self.origin, tokenizer_in(self.notes.get("batches"))
        folder = None if origin is None else (origin, str(origin))
        has_trained, data = self.step > WEIGHTS_ALONE, training_data(self.cfg)
        return KnownTexts(str(self.workdir), folder, origin, data, noted, has_trained)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """How the run makes and keeps its weights."""
        return recipe_of(self.cfg)

    @property
    def shapes(self) -> Any:
        """Of the model as its constructor makes it."""
        return self.recipe.shapes

    @property
    def compute_dtype(self) -> str:
        return fdl.build(self.cfg.compute).dtype

    def abstract_model(self, mesh: Mesh) -> Any:
        """The model's shapes, dtypes and layouts on `mesh`."""
        return abstract_model(lambda: self.recipe.made, mesh)

    @functools.cached_property
    def origin(self) -> Path | None:
        """The folder of Hugging Face's that the run began with, or what an imported workdir kept of
        it; `None` if it did not begin so, or that is gone."""
        for workdir, _, _ in self._beginnings():
            if (origin := unlinked(workdir, ORIGIN)).is_dir():
                return origin
        if self.began_with is None:
            return None
        with contextlib.suppress(FolderError):
            return local_folder_of(self.began_with, weights=False)
        return None

    @functools.cached_property
    def began_with(self) -> str | None:
        """The folder of Hugging Face's, or the name, of a whole model that the run began with, or
        the run that it began with, and so on; `None` if it did not begin so."""
        *_, (_, before, _) = self._beginnings()
        if before is None or before.rpartition("@")[2].isdecimal():
            return None
        with contextlib.suppress(ValueError, OSError):
            return base_of(HuggingFace(Path(before), before)).name
        return before

    @functools.cached_property
    def trained(self) -> list[frozenset[str]]:
        """The paths, in the model without adapters, of the weights that this run trained; of those
        that the run changed which it began with; and so on, back to `began_with`."""
        base, adapted = without_adapters(self.recipe.shapes), set(named_weights(self.recipe.shapes))
        every, same_adapters = frozenset(named_weights(base)), True
        found: list[frozenset[str]] = []
        for _, before, there in self._beginnings():
            merged = {path.removesuffix(".down") for path in there - every}
            same_adapters &= not found or (bool(merged) and there <= adapted)
            found.append(every & (there if same_adapters else there | merged))
            folder = Path(before or "")
            if before is not None and holds_adapters(folder):
                base_folder = base_of(HuggingFace(folder, before)).folder
                names = described(base_folder, self.access.families).family.names
                held = adapters_in(folder, base, names)
                whole = frozenset(p.path for each in held.whole for p in each.tensor.pieces)
                found.append(whole if same_adapters else whole | held.sizes.keys())
        return found

    def _beginnings(self) -> Iterator[tuple[Path, str | None, frozenset[str]]]:
        """The workdir of this run, what it began with, and the paths of what it trained; the same
        of the run that this was, and so on."""
        workdir, notes, saved = self.workdir, self.notes, self.folder
        for _ in range(20):
            noted = notes.get("initialised_from")
            before = noted if isinstance(noted, str) else None
            yield workdir, before, _trained(saved, notes)
            folder, _, step = (before or "").rpartition("@")
            if not step.isdecimal():
                return
            workdir = folder_to_read(os.path.dirname(folder))
            saved = workdir / os.path.basename(folder) / step
            notes = _notes(saved) if is_there(saved) else {}


def recipe_of(cfg: fdl.Config) -> Recipe:
    """How a run of `cfg` makes and keeps its weights."""
    dtype = cfg.frozen_dtype or fdl.build(cfg.compute).dtype
    groups = None if cfg.trainable is None else fdl.build(cfg.trainable)
    return Recipe(fdl.build(cfg.model), cfg.seed, groups, dtype)


def in_float32(recipe: Recipe) -> Recipe:
    """`recipe`, with frozen weights in float32: every value that a folder or a run stores, which
    adapters are merged into and exports hold."""
    return dataclasses.replace(recipe, frozen_dtype="float32")


def use_run(found: Saved, use: Callable[[SavedRun], _T], access: Access = PLAIN) -> _T:
    """What `use` makes of the checkpoint that `found` names, the newest unless it says which. If
    its run removes the newest meanwhile, that of the one that is newest then.

    Raises:
      ValueError, OSError: if there is no such checkpoint, or its config or notes are damaged.
      RemovedCheckpointError: if it was named, or a run removes one after the other.
    """
    tries = _TRIES if found.step is None else 1
    while True:
        tries -= 1
        try:
            run = opened(found, access)
            if access.init_from is not None and run.access.init_from is None:
                access.show(
                    f"--init_from={access.init_from} is ignored: {run.folder} holds the whole model"
                )
            return use(run)
        except RemovedCheckpointError as error:
            if not tries:
                raise
            access.show(f"{error}; going on with the newest there is now")


def opened(found: Saved, access: Access) -> SavedRun:
    """The checkpoint that `found` names, as in `use_run`."""
    steps = from_first(steps_in(found.folder))  # a run that goes on may just add one
    if not steps:
        raise ConfigError(f"{found.folder} holds no checkpoint")
    step = steps[-1] if found.step is None else found.step
    if step not in steps:
        raise ConfigError(f"{found.folder} has no whole checkpoint at step {step}; it has {steps}")
    notes = _notes(found.folder / str(step))
    if notes.get("frozen") is None:
        access = dataclasses.replace(access, init_from=None)
    if access.init_from is not None:
        notes["initialised_from"] = _noted(access.init_from)
    return SavedRun(found.folder, step, notes, access)


def _trained(saved: Path, notes: Mapping[str, Any]) -> frozenset[str]:
    """The paths of the weights in a checkpoint, but for those of a whole model that was brought in,
    which nothing has trained yet."""
    if not is_there(saved) or (saved.name == str(WEIGHTS_ALONE) and notes.get("frozen") is None):
        return frozenset()
    with reading(saved):
        names = read_manifest(saved).arrays
    return frozenset(name.removeprefix("model.") for name in names if name.startswith("model."))


def _notes(saved: Path) -> dict[str, Any]:
    """Those of a checkpoint, which was there before."""
    with reading(saved):
        return read_notes(saved, read_manifest(saved))


def _noted(reference: str) -> str:
    """A reference as notes have it."""
    found = located(reference)
    if isinstance(found, HuggingFace):
        return found.name
    step = max(steps_in(found.folder), default=None) if found.step is None else found.step
    return f"{shown(found.folder.absolute())}@{step}"
