"""Saved models: `open_model` turns a reference into a model that can be read onto a mesh.

    "RUN@5000" ──────────┬─ open_model ──▶ SavedRun ────┬─ model(mesh)  ──▶ the model itself
    "Qwen/Qwen3-0.6B" ───┘                 ModelFolder ─┴─ fill(target) ──▶ an experiment's model

`fill` reads the weights into the model of an experiment. That model may have adapters that the
weights lack, or lack adapters that they have, or keep weights in another dtype. A checkpoint holds
only the weights that were trained. The others are read from the model that the run began with,
which is again a reference.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import fiddle as fdl
import jax
import jax.numpy as jnp
import xxhash
from jax.sharding import Mesh

from lmlib.adapters.lora import merged
from lmlib.checkpoint import Checkpoints, RemovedCheckpointError
from lmlib.checkpoint.folders import is_there, reading, steps_in
from lmlib.checkpoint.manifest import encode, read_manifest, read_notes
from lmlib.hf.folder import FolderError
from lmlib.hf.hub import local_folder_of
from lmlib.models.matrices.lora import LoRAMatrix, has_adapters, map_adapted, without_adapters
from lmlib.models.weights import creator
from lmlib.optim.average import EVALUATED, KEPT
from lmlib.optim.trainable import Group
from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.fingerprint import fingerprint
from lmlib.parallel.mesh import on_mesh_of
from lmlib.parallel.selection import named_weights
from lmlib.recipe import Recipe
from lmlib.state import ModelParts, abstract_model, split_by_training
from lmlib.storage.local_folder import folder_to_read, shown
from lmlib.storage.unlinked import unlinked
from runner.config import configs
from runner.config.configs import training_data
from runner.config.references import FolderReference, RunReference, resolve
from runner.errors import ConfigError, error_text, user_errors
from runner.processes.agreement import Read, agreed, from_first, require_same_reads
from runner.weights.model_folder import ORIGIN, ModelFolder
from runner.weights.notes import (
    WEIGHTS_ALONE,
    is_batches_note,
    is_frozen_note,
    tokenizer_changed,
    tokenizer_in,
)
from runner.weights.target import PLAIN, LoadOptions, LoadTarget, without_extra_heads
from runner.weights.texts import TextSources

_BUFFERS = "buffers"  # the part of the state for weights without gradients
_TRIES = 3  # attempts to read the newest checkpoint while the run continues
_MOST_ANCESTORS = 20
_T = TypeVar("_T")


def open_model(
    found: str | RunReference | FolderReference, options: LoadOptions = PLAIN
) -> "SavedRun | ModelFolder":
    """Finds a saved model: `RUN`, `RUN@STEP`, a Hugging Face or PEFT folder, or a Hub name.

    Only its small files are read. Raises ValueError or OSError if there is no such model, or its
    notes are damaged, and RemovedCheckpointError if its run removes the checkpoint meanwhile.
    """
    if isinstance(found, str):
        found = resolve(found)
    if isinstance(found, FolderReference):
        if options.average:
            raise ConfigError(f"{found.name} has no weight average: leave out --weights=ema")
        return ModelFolder(found, options)
    steps = from_first(steps_in(found.folder))  # the run may just be adding one
    if not steps:
        raise ConfigError(f"{found.folder} has no checkpoint")
    step = steps[-1] if found.step is None else found.step
    if step not in steps:
        raise ConfigError(f"{found.folder} has no whole checkpoint at step {step}; it has {steps}")
    notes = _notes(found.folder / str(step))
    if options.init_from is not None and notes.get("frozen") is not None:
        notes["initialised_from"] = _noted(options.init_from)
    return SavedRun(found.folder, step, notes, options)


def use_model(
    reference: str, use: Callable[["SavedRun | ModelFolder"], _T], options: LoadOptions = PLAIN
) -> _T:
    """Calls `use` with the model of `reference`.

    If `reference` names no step and the run removes its newest checkpoint meanwhile, `use` is
    called again with the next newest. Raises as `open_model` does.
    """
    found = resolve(reference)
    tries = _TRIES if isinstance(found, RunReference) and found.step is None else 1
    while True:
        tries -= 1
        try:
            return use(open_model(found, options))
        except RemovedCheckpointError as error:
            if not tries:
                raise
            options.show(f"{error}; going on with the newest there is now")


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run. Only its notes are read until the weights are needed."""

    checkpoints: Path  # the folder of the run's checkpoints
    step: int
    notes: dict[str, Any]  # the JSON that the run saved beside the arrays
    options: LoadOptions = PLAIN

    # only folders have them
    generation_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @property
    def workdir(self) -> Path:
        return self.checkpoints.parent

    @property
    def folder(self) -> Path:
        """The folder of this checkpoint."""
        return self.checkpoints / str(self.step)

    @property
    def name(self) -> str:
        return f"{shown(self.workdir)}@{self.step}{', the average' if self.options.average else ''}"

    @functools.cached_property
    def cfg(self) -> fdl.Config:
        """The run's config; raises ConfigError if it is missing or damaged."""
        return configs.load(str(self.workdir / "config.json"), trusted=self.options.trusted)

    @property
    def has_config(self) -> bool:
        return (self.workdir / "config.json").is_file()

    @functools.cached_property
    def texts(self) -> TextSources:
        origin, noted = self.origin, tokenizer_in(self.notes.get("batches"))
        folder = None if origin is None else (origin, str(origin))
        has_trained, data = self.step > WEIGHTS_ALONE, training_data(self.cfg)
        return TextSources(str(self.workdir), folder, origin, data, noted, has_trained)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe by which the run makes and keeps its weights."""
        return recipe_of(self.cfg)

    @property
    def shapes(self) -> Any:
        """The shapes of the model, as its constructor makes it."""
        return self.recipe.shapes

    @property
    def compute_dtype(self) -> str:
        return fdl.build(self.cfg.compute).dtype

    @property
    def content(self) -> Read:
        """A digest of the manifest, which contains the digests of all files."""
        manifest = xxhash.xxh3_128_hexdigest(encode(read_manifest(self.folder)))
        return Read([manifest], [shown(self.folder.absolute())])

    def abstract_model(self, mesh: Mesh) -> Any:
        """Returns the model's shapes, dtypes and layouts on `mesh`."""
        return abstract_model(lambda: self.recipe.abstract_model, mesh)

    def model(self, mesh: Mesh, exact: bool = False) -> Any:
        """Returns the model, laid out on `mesh` as it is stored.

        Raises ValueError or OSError if a byte is damaged, or the frozen weights are gone, and
        RemovedCheckpointError if the run has removed the checkpoint since.

        Args:
          exact: keep every stored value of frozen weights, in float32, instead of the run's dtype.
        """
        with reading(self.folder), _errors_of(f"{self.checkpoints}@{self.step}"):
            recipe = _in_float32(self.recipe) if exact else self.recipe
            return self.fill(LoadTarget(recipe, mesh))[0]

    def trained_weights(self, mesh: Mesh) -> Any:
        """Returns the model with only its trained weights read; frozen weights are shapes."""
        shapes = abstract_model(lambda: self.recipe.shapes, mesh)
        parts = split_by_training(shapes, self.recipe.trained)
        with reading(self.folder), Checkpoints(self.checkpoints, read_only=True) as checkpoints:
            arrays, _ = self._restore(checkpoints, self._part(checkpoints), parts)
        return eqx.combine(arrays, parts.frozen)

    def fill(self, target: LoadTarget) -> tuple[Any, str]:
        """Returns the model of `target` with these weights, and their name.

        Adapters that the checkpoint lacks are initialised; adapters that `target` lacks are merged.
        Heads of multi-token prediction that it lacks are initialised too, or left out.
        """
        recipe, mesh = target.recipe, target.mesh
        with Checkpoints(self.checkpoints, read_only=True) as checkpoints:
            part = self._part(checkpoints)
            with_gradient = checkpoints.names(self.step, part)
            there = with_gradient | checkpoints.names(self.step, _BUFFERS)
            own = self._recipe_of_checkpoint(there, recipe)
            if own is not recipe:
                target.check_model(own.bare)
            # A run that trains part of the model saves only that part.
            in_part = there < _paths(own.shapes)
            abstract = abstract_model(lambda: own.shapes, mesh)
            parts = ModelParts(abstract, None, None)
            if in_part or there != with_gradient:
                parts = split_by_training(abstract, there)
            model, notes = self._restore(checkpoints, part, parts)
        if target.data is not None:
            before: Any = notes.get("batches")
            if not is_batches_note(before, self.step):
                raise ConfigError(f"its notes are invalid: batches={before!r:.80}")
            target.check_tokenizer(tokenizer_changed(target.data, before))
        name = f"{shown(self.checkpoints)}@{self.step}"
        if in_part:
            # a run in the same folder may delete it, so refer to its base
            if self.step == WEIGHTS_ALONE:
                name = notes.get("initialised_from") or name
            own = dataclasses.replace(own, groups={"there": Group(tuple(there))})
            options = dataclasses.replace(self.options, average=None)
            model = eqx.combine(model, frozen_weights(notes, own, mesh, options))
        if has_adapters(own.shapes) and _paths(own.shapes) == _paths(recipe.shapes):
            if "model" not in target.allowed_changes and self.has_config:
                target.check_adapters(self.recipe.shapes)  # weights do not determine alpha
            model = jax.tree.map(lambda x, to: x.astype(to.dtype), model, recipe.abstract_model)
            return model, name
        return recipe.completed(_kept(merged_into_bases(model), recipe), mesh), name

    def _restore(
        self, checkpoints: Checkpoints, part: str, parts: ModelParts
    ) -> tuple[Any, Mapping[str, Any]]:
        """Returns the checkpoint's model, with `None` for frozen weights, and its notes."""
        model, notes = checkpoints.restore_part(self.step, part, parts.trained)
        if parts.buffers is not None:
            buffers, _ = checkpoints.restore_part(self.step, _BUFFERS, parts.buffers)
            model = eqx.combine(model, buffers)
        return model, notes

    def _part(self, checkpoints: Checkpoints) -> str:
        """Returns the part of the state that holds the requested weights."""
        average = self.options.average
        if average is not False and checkpoints.names(self.step, EVALUATED):
            return EVALUATED
        if not average:
            return "model"
        if not checkpoints.names(self.step, KEPT):
            raise ConfigError(
                f"{self.workdir}@{self.step} keeps no average of its weights, since the run's "
                "`average` was not set: leave out --weights=ema"
            )
        return KEPT

    def _recipe_of_checkpoint(self, there: Set[str], recipe: Recipe) -> Recipe:
        """Returns the recipe of the run that saved the weights `there`.

        This is `recipe`, or `recipe` without adapters, or the run's own if both lack some weights,
        or have heads of multi-token prediction, or a score, that the run may lack.
        """

        def plain(*, key: Any) -> Any:
            return without_adapters(recipe.model(key=key))

        bare = _paths(recipe.bare)
        has_more = hasattr(recipe.bare, "predictors") or hasattr(recipe.bare, "score")
        if there < bare and has_more and self.has_config:
            return _in_float32(self.recipe)  # which may have no heads, or no score
        if there <= bare:
            return _in_float32(dataclasses.replace(recipe, model=plain, groups=None))
        if there <= _paths(recipe.shapes) or not self.has_config:
            return recipe
        return _in_float32(self.recipe)

    @functools.cached_property
    def origin(self) -> Path | None:
        """The original Hugging Face folder, or its copy in an imported workdir, or `None`."""
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
        """The folder or Hub name of the full model that the first of these runs began with.

        `None` if the first run began with newly initialised weights.
        """
        *_, (_, before, _) = self._beginnings()
        if before is None or before.rpartition("@")[2].isdecimal():
            return None
        with contextlib.suppress(ValueError, OSError):
            return self._folder_of(before).base.name
        return before

    @functools.cached_property
    def trained(self) -> list[frozenset[str]]:
        """The paths of the weights that this run trained, then of each of its ancestors.

        The list ends with the run that started from `began_with`. Paths refer to the model without
        adapters.
        """
        base, adapted = without_adapters(self.recipe.shapes), _paths(self.recipe.shapes)
        every, same_adapters = frozenset(_paths(base)), True
        found: list[frozenset[str]] = []
        for _, before, there in self._beginnings():
            merged = {path.removesuffix(".down") for path in there - every}
            same_adapters &= not found or (bool(merged) and there <= adapted)
            found.append(every & (there if same_adapters else there | merged))
            held = None if before is None else self._folder_of(before).adapters_of(base)
            if held is not None:
                whole = frozenset(p.path for each in held.whole for p in each.tensor.pieces)
                found.append(whole if same_adapters else whole | held.sizes.keys())
        return found

    def _folder_of(self, name: str) -> ModelFolder:
        """Returns the model in the folder `name`, with the base that it names itself."""
        options = dataclasses.replace(self.options, init_from=None)
        return ModelFolder(FolderReference(Path(name), name), options)

    def _beginnings(self) -> Iterator[tuple[Path, str | None, frozenset[str]]]:
        """Yields the workdir, initial reference and trained paths of this run and its ancestors."""
        workdir, notes, saved = self.workdir, self.notes, self.folder
        for _ in range(_MOST_ANCESTORS):
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
    """Returns the recipe by which a run of `cfg` makes and keeps its weights."""
    dtype = cfg.frozen_dtype or fdl.build(cfg.compute).dtype
    groups = None if cfg.trainable is None else fdl.build(cfg.trainable)
    return Recipe(fdl.build(cfg.model), cfg.seed, groups, dtype)


def _in_float32(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, frozen_dtype="float32")


def read_weights(
    reference: str, target: LoadTarget, options: LoadOptions = PLAIN
) -> tuple[Any, str]:
    """Returns the model of `target` with the weights of `reference`, and their name.

    The name is `run@step` or the folder. All processes must read the same weights. Frozen weights
    are read from their original place, whatever `options.init_from` is. Raises ConfigError if there
    is no such model, it is damaged, or it does not fit `target`.
    """
    options = dataclasses.replace(options, init_from=None)
    with agreed():
        found = resolve(reference)
    with _errors_of(reference):
        with agreed(), user_errors():
            source = open_model(found, options)
        require_same_reads(lambda: {"the model": source.content})
        return source.fill(target)


def frozen_weights(
    notes: Mapping[str, Any], recipe: Recipe, mesh: Mesh, options: LoadOptions = PLAIN
) -> Any:
    """Returns the frozen weights of `recipe`, with `None` in place of the others.

    Checkpoints leave them out, so they are read from `options.init_from`, or from the model that
    the run of `notes` began with. Raises ConfigError if they cannot be read, or differ from the
    run's weights.
    """
    origin, before = notes.get("initialised_from"), notes.get("frozen")
    if before is None or not is_frozen_note(before):
        raise ConfigError(f"invalid notes of frozen weights: {before!r:.80}")
    if origin is None:
        recipe = dataclasses.replace(recipe, seed=before["seed"])
        with jax.set_mesh(mesh):
            frozen = creator(
                lambda: split_by_training(recipe.make(), recipe.trained).frozen, mesh
            )()
    else:
        options.show("reading the frozen weights, which checkpoints do not hold")
        target = LoadTarget(recipe, mesh, allowed_changes=("data", "model"))
        try:
            model, _ = read_weights(options.init_from or origin, target, options)
        except ConfigError as error:
            raise ConfigError(
                f"its frozen weights, which checkpoints do not hold, cannot be read: {error}; if "
                f"{origin} has moved, --init_from says where it is now"
            ) from error
        frozen = split_by_training(model, recipe.trained).frozen
    was, same = before["dtype"], before["dtype"] == recipe.frozen_dtype
    if same or recipe.frozen_dtype == "float32":  # the run's weights are a rounding of these
        as_before = None if same else dataclasses.replace(recipe, frozen_dtype=was).kept
        if fingerprint(frozen, as_before) != before["digest"]:
            raise ConfigError(
                f"the frozen weights of {origin or 'this experiment'} differ from the weights that "
                "the run was trained with: name the right model with --init_from"
            )
    return frozen


def merged_into_bases(model: M) -> M:
    """Returns `model` with each adapter added to its base, one after the other.

    The base buffers are float32 and are donated.
    """

    def merge(_: str, one: LoRAMatrix) -> jax.Array:
        return _merged(one.base, dataclasses.replace(one, base=None))

    with on_mesh_of(model):
        return map_adapted(merge, model)


@functools.partial(jax.jit, donate_argnums=0)
def _merged(base: jax.Array, rest: Any) -> Any:
    return merged(dataclasses.replace(rest, base=base))


def _kept(model: Any, recipe: Recipe) -> Any:
    """Returns the weights of `model` in the form that `recipe` keeps; donates them one by one."""
    arrays: dict[str, jax.Array] = {}
    map_weights(lambda weight, array: arrays.update({weight.path: array}), model)

    def keep(weight: Weight, _: Any) -> Any:
        array = arrays.pop(weight.path)
        made = jax.block_until_ready(recipe.kept(weight, array.astype(jnp.float32)))
        if jax.tree.leaves(made)[0].dtype != array.dtype:
            array.delete()
        return made

    return map_weights(keep, without_extra_heads(recipe.bare, model))


def _paths(model: Any) -> set[str]:
    return set(named_weights(model))


@contextlib.contextmanager
def _errors_of(reference: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(f"the weights of {reference}: {error_text(error)}") from error


def _trained(saved: Path, notes: Mapping[str, Any]) -> frozenset[str]:
    """Returns the paths of the weights in a checkpoint.

    Empty for an imported model that nothing has trained yet.
    """
    if not is_there(saved) or (saved.name == str(WEIGHTS_ALONE) and notes.get("frozen") is None):
        return frozenset()
    with reading(saved):
        names = read_manifest(saved).arrays
    return frozenset(name.removeprefix("model.") for name in names if name.startswith("model."))


def _notes(saved: Path) -> dict[str, Any]:
    with reading(saved):
        return read_notes(saved, read_manifest(saved))


def _noted(reference: str) -> str:
    """Returns a reference in the form used in notes."""
    found = resolve(reference)
    if isinstance(found, FolderReference):
        return found.name
    step = max(steps_in(found.folder), default=None) if found.step is None else found.step
    return f"{shown(found.folder.absolute())}@{step}"
