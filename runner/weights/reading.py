"""From the name of weights to a model on a mesh.

    "RUN@5000" ── located ──▶ Saved ─────── opened ──▶ SavedRun ──┐
    "Qwen/Qwen3-0.6B" ──────▶ HuggingFace ───────────▶ ModelFolder ┴──▶ weights_of, model_of

`weights_of` fills the model of an experiment, which may have adapters that are not there, or merged
ones, or keep weights in another dtype. `model_of` makes the model itself. A checkpoint holds only
what trained: the rest is read from what the run began with, which is again such a name.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lmlib.adapters.lora import merged
from lmlib.checkpoint import Checkpoints, Restored
from lmlib.checkpoint.removal import reading
from lmlib.experiment import Experiment
from lmlib.models.matrices.adapted import Adapted, has_adapters, map_adapted, without_adapters
from lmlib.optim.average import IN_STATE
from lmlib.optim.trainable import Group
from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.creation import creator
from lmlib.parallel.fingerprint import fingerprint
from lmlib.parallel.mesh import on_mesh_of
from lmlib.parallel.selection import named_weights
from lmlib.recipe import Recipe
from lmlib.state import Parts, State, abstract_model, parted
from lmlib.storage.bucket.copies import shown
from runner.config.references import HuggingFace, located
from runner.errors import ConfigError, in_words, user_errors
from runner.processes.agreement import agreed, require_same_reads
from runner.weights.contents import content_of
from runner.weights.model_folder import ModelFolder
from runner.weights.notes import (
    WEIGHTS_ALONE,
    is_batches_note,
    is_frozen_note,
    tokenizer_changed,
)
from runner.weights.saved_run import PLAIN, Access, SavedRun, in_float32, opened
from runner.weights.wanted import Keeping, Wanted

_BUFFERS = "buffers"  # the part of the state with the weights that have no gradient


def weights_of(reference: str, wanted: Wanted, access: Access = PLAIN) -> tuple[Any, str]:
    """The model that is `wanted`, with the weights that `reference` means, and whose they are:
    `run@step` or the folder. Adapters that are not there are new; those that are there and not in
    the recipe are merged.

    Args:
      reference: as in `located`.
      access: its `init_from` is not looked at: what a run did not train is read from where it was.

    Raises:
      ConfigError: if there is none, it is damaged, or it holds another model or was trained on
        another tokenizer's ids.
    """
    with agreed():
        found = located(reference)
    with _errors_of(reference):
        if isinstance(found, HuggingFace):
            folder = ModelFolder(found, access.families)
            require_same_reads(lambda: {"the model": content_of(folder)})
            return folder.weights(wanted, access.show), found.name
        with agreed(), user_errors():
            run = opened(found, dataclasses.replace(access, init_from=None))
        require_same_reads(lambda: {"the model": content_of(run)})
        return _of_run(run, wanted)


def model_of(
    source: SavedRun | ModelFolder,
    mesh: Mesh,
    access: Access = PLAIN,
    recipe: Recipe | None = None,
) -> Any:
    """The model itself, laid out on `mesh` as it is stored, what is frozen from where the run had
    it; nothing else of a checkpoint is read.

    Args:
      recipe: how a run's weights are kept; `None`: as the run keeps them.

    Raises:
      ValueError, OSError: if a byte of it is not as it was saved, or the frozen weights are gone.
      RemovedCheckpointError: if the run has removed it since.
    """
    if isinstance(source, ModelFolder):
        return source.model(mesh, access.show)
    with reading(source.folder), _errors_of(f"{source.checkpoints}@{source.step}"):
        return _of_run(source, Wanted(recipe or source.recipe, mesh))[0]


def own_weights(run: SavedRun, mesh: Mesh) -> Any:
    """As `model_of`, with shapes in place of what is frozen, which is not looked for."""
    parts = parted(abstract_model(lambda: run.recipe.shapes, mesh), run.recipe.trained)
    with reading(run.folder), Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        arrays, _ = _restored(checkpoints, run.step, _part(run, checkpoints), parts)
    return eqx.combine(arrays, parts.frozen)


@contextlib.contextmanager
def _errors_of(reference: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(f"the weights of {reference}: {in_words(error)}") from error


def _of_run(run: SavedRun, wanted: Wanted) -> tuple[Any, str]:
    recipe, mesh = wanted.recipe, wanted.mesh
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        part = _part(run, checkpoints)
        with_gradient = checkpoints.names(run.step, part)
        there = with_gradient | checkpoints.names(run.step, _BUFFERS)
        own = _recipe_of_checkpoint(run, there, recipe)
        if own is not recipe:
            wanted.check_model(own.bare)
        # A model that trained in part left the rest where it came from.
        in_part = there < _paths(own.shapes)
        target = abstract_model(lambda: own.shapes, mesh)
        whole = there == with_gradient and not in_part
        parts = Parts(target, None, None) if whole else parted(target, there)
        model, notes = _restored(checkpoints, run.step, part, parts)
    if wanted.data is not None:
        before: Any = notes.get("batches")
        if not is_batches_note(before, run.step):
            raise ConfigError(f"its notes make no sense: batches={before!r:.80}")
        wanted.check_tokenizer(tokenizer_changed(wanted.data, before))
    name = f"{shown(run.checkpoints)}@{run.step}"
    if in_part:
        if run.step == WEIGHTS_ALONE:  # a run in the same folder may delete it: its base stays
            name = notes.get("initialised_from") or name
        own = dataclasses.replace(own, groups={"there": Group(tuple(there))})
        frozen = frozen_weights(notes, own, mesh, dataclasses.replace(run.access, average=False))
        model = eqx.combine(model, frozen)
    if has_adapters(own.shapes) and _paths(own.shapes) == _paths(recipe.shapes):
        if "model" not in wanted.allowed_changes and run.has_config:
            wanted.check_adapters(run.recipe.shapes)  # weights do not tell alpha
        return jax.tree.map(lambda x, kept: x.astype(kept.dtype), model, recipe.made), name
    keeping = Keeping(recipe)
    kept = _kept(merged_into_bases(model), recipe, keeping)
    keeping.tell(name, run.access.show)
    return recipe.completed(kept, mesh), name


def _restored(
    checkpoints: Checkpoints, step: int, part: str, parts: Parts
) -> tuple[Any, Mapping[str, Any]]:
    """A checkpoint's model, with `None` in place of what is frozen, and its notes.

    Args:
      part: of the state that has the weights with a gradient.
    """
    model, notes = checkpoints.restore_part(step, part, parts.trained)
    if parts.buffers is not None:
        buffers, _ = checkpoints.restore_part(step, _BUFFERS, parts.buffers)
        model = eqx.combine(model, buffers)
    return model, notes


def _part(run: SavedRun, checkpoints: Checkpoints) -> str:
    """Which part of the state has the weights that are wanted.

    Raises ConfigError if that is an average, and the run kept none.
    """
    if not run.access.average:
        return "model"
    if not checkpoints.names(run.step, IN_STATE):
        raise ConfigError(
            f"{run.workdir}@{run.step} keeps no average of its weights, since the run's `average` "
            "was not set: leave out --weights=ema"
        )
    return IN_STATE


def _recipe_of_checkpoint(run: SavedRun, there: Set[str], recipe: Recipe) -> Recipe:
    """Of the run that saved the weights `there`: `recipe`, that without adapters, or if both lack
    some of them, the run's own."""

    def plain(*, key: Any) -> Any:
        return without_adapters(recipe.model(key=key))

    if there <= _paths(recipe.bare):
        return in_float32(dataclasses.replace(recipe, model=plain, groups=None))
    if there <= _paths(recipe.shapes) or not run.has_config:
        return recipe
    return in_float32(run.recipe)


def merged_into_bases(model: M) -> M:
    """`model` with each adapter added to its base, one after the other; it takes the buffers of the
    bases, which are float32."""

    def merge(_: str, one: Adapted) -> jax.Array:
        return _merged(one.base, dataclasses.replace(one, base=None))

    with on_mesh_of(model):
        return map_adapted(merge, model)


@functools.partial(jax.jit, donate_argnums=0)
def _merged(base: jax.Array, rest: Any) -> Any:
    return merged(dataclasses.replace(rest, base=base))


def _kept(model: Any, recipe: Recipe, keeping: Keeping) -> Any:
    """The weights of `model` as `recipe` keeps them, one made after the other; it takes their
    buffers."""
    arrays: dict[str, jax.Array] = {}
    map_weights(lambda weight, array: arrays.update({weight.path: array}), model)

    def keep(weight: Weight, _: Any) -> Any:
        array = arrays.pop(weight.path)
        made = jax.block_until_ready(keeping(weight, array.astype(jnp.float32)))
        if jax.tree.leaves(made)[0].dtype != array.dtype:
            array.delete()
        return made

    return map_weights(keep, recipe.bare)


def _paths(model: Any) -> set[str]:
    return set(named_weights(model))


def completed(
    found: Restored, experiment: Experiment, reference_model: Any, access: Access
) -> State:
    """The state of a checkpoint with the weights that no checkpoint holds: the reference model and
    what is frozen."""
    state, recipe = found.state.with_reference_model(reference_model), experiment.recipe
    if recipe.trained is None:
        return state
    return state.with_frozen(frozen_weights(found.notes, recipe, experiment.mesh, access))


def frozen_weights(
    notes: Mapping[str, Any], recipe: Recipe, mesh: Mesh, access: Access = PLAIN
) -> Any:
    """The weights of `recipe` that do not train, which no checkpoint holds: from where the run with
    the checkpoint of `notes` had them, with `None` in place of others.

    Args:
      access: its `init_from` is looked at first.

    Raises:
      ConfigError: if they are not to be had, or are not those that the run had.
    """
    origin, before = notes.get("initialised_from"), notes.get("frozen")
    if before is None or not is_frozen_note(before):
        raise ConfigError(f"a checkpoint's notes of frozen weights make no sense: {before!r:.80}")
    if origin is None:
        recipe = dataclasses.replace(recipe, seed=before["seed"])
        with jax.set_mesh(mesh):
            frozen = creator(lambda: parted(recipe.make(), recipe.trained).frozen, mesh)()
    else:
        access.show("reading the frozen weights, which checkpoints do not hold")
        wanted = Wanted(recipe, mesh, allowed_changes=("data", "model"))
        try:
            model = _first_of([access.init_from, origin], wanted, access)
        except ConfigError as error:
            raise ConfigError(
                f"its frozen weights, which checkpoints do not hold, cannot be read: {error}; if "
                f"{origin} has moved, --init_from says where it is now"
            ) from error
        frozen = parted(model, recipe.trained).frozen
    was, same = before["dtype"], before["dtype"] == recipe.frozen_dtype
    if same or recipe.frozen_dtype == "float32":  # of which those of the run are made
        as_before = None if same else dataclasses.replace(recipe, frozen_dtype=was).kept
        if fingerprint(frozen, as_before) != before["digest"]:
            raise ConfigError(
                f"the frozen weights of {origin or 'this experiment'} are not those that the run "
                "was trained with: give those that were, with --init_from"
            )
    return frozen


def _first_of(references: Sequence[str | None], wanted: Wanted, access: Access) -> Any:
    """The model of the first reference that has one."""
    errors = []
    for reference in dict.fromkeys(each for each in references if each is not None):
        try:
            return weights_of(reference, wanted, access)[0]
        except ConfigError as error:
            errors.append(error)
    raise errors[0]
