"""The weights that a reference means, made into the model of a run."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import equinox as eqx
import fiddle as fdl
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lmlib.adapters import merged, without_adapters
from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import Source
from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.hf.families import described
from lmlib.hf.load import load_weights
from lmlib.hf.peft import Adapters, adapters_in
from lmlib.models.differences import differences
from lmlib.models.matrices.adapted import Adapted, has_adapters, map_adapted
from lmlib.optim.trainable import Group
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.fingerprint import fingerprint
from lmlib.parallel.layout import creator
from lmlib.parallel.selection import named_weights
from lmlib.recipe import Recipe, parted
from lmlib.state import abstract_model
from runner.config import configs
from runner.errors import ConfigError, in_words, user_errors
from runner.processes.agreement import agreed, from_first
from runner.training import data_probe
from runner.watch.transfer import told
from runner.weights.references import HuggingFace, Saved, base_of, located, tokenizer_of

WEIGHTS_ALONE = 0  # the step of a checkpoint of weights alone: `runner.convert` makes it, no run
_SHOWN = 6  # differences


def weights_of(
    reference: str,
    recipe: Recipe,
    mesh: Mesh,
    data: Source | None,
    allowed_changes: Collection[str] = (),
    show: Callable[[str], None] = lambda line: None,
    trusted: Collection[str] = (),
    init_from: str | None = None,
) -> tuple[Any, str]:
    """The model of `recipe` with the weights that `reference` means, laid out on `mesh`, and whose
    they are: `run@step` or the folder. Adapters that are not there are new; those that are there
    and not in `recipe` are merged.

    Args:
      reference: as in `located`.
      data: whose ids the model must know; `None`: any.
      allowed_changes: "data": its tokenizer may be another than the data's. "model": settings of
        the model in a folder of Hugging Face's may be others, where its weights fit.
      show: gets a line now and then while a folder is read.
      trusted: modules that a run's config.json may refer to; it is read to merge adapters.
      init_from: where what the run began with is now, whose checkpoint does not hold all weights;
        `None`: where it was.

    Raises:
      ConfigError: if there is none, it is damaged, or it holds another model or was trained on
        another tokenizer's ids.
    """
    with agreed():
        found = located(reference)
    try:
        if isinstance(found, Saved):
            return _of_run(found, recipe, mesh, data, allowed_changes, show, trusted, init_from)
        return of_folder(found, recipe, mesh, data, allowed_changes, show), found.name
    except (ValueError, OSError) as error:
        raise ConfigError(f"the weights of {reference}: {in_words(error)}") from error


def _of_run(
    found: Saved,
    recipe: Recipe,
    mesh: Mesh,
    data: Source | None,
    allowed_changes: Collection[str],
    show: Callable[[str], None],
    trusted: Collection[str],
    init_from: str | None,
) -> tuple[Any, str]:
    with Checkpoints(found.folder, read_only=True) as checkpoints:
        # A run that goes on may add one before another process looks.
        step = from_first(checkpoints.newest()) if found.step is None else found.step
        if step is None:
            raise ConfigError(f"{found.folder} holds no checkpoint")
        there = checkpoints.names(step, "model")
        own = _recipe_of_checkpoint(found.folder, there, recipe, trusted)
        if own is not recipe:
            _check_same_model(own.bare, recipe.bare, allowed_changes)
        # A model that trained in part left the rest where it came from.
        in_part = there < _paths(own.shapes)
        target = abstract_model(lambda: own.shapes, mesh)
        if in_part:
            target = parted(target, there).trained
        model, notes = checkpoints.restore_part(step, "model", target)
    if data is not None:
        before: Any = notes.get("batches")
        if not data_probe.is_probe(before, step):
            raise ConfigError(f"its notes make no sense: batches={before!r:.80}")
        problem = data_probe.tokenizer_changed(data, before)
        _check_tokenizer(problem, "data" in allowed_changes)
    name = f"{found.folder}@{step}"
    if in_part and step == WEIGHTS_ALONE:  # a run in the same folder may delete it: its base stays
        name = notes.get("initialised_from") or name
    if in_part:
        own = dataclasses.replace(own, groups={"there": Group(tuple(there))})
        model = eqx.combine(model, frozen_weights(notes, own, mesh, init_from, show, trusted))
    if has_adapters(own.shapes) and _paths(own.shapes) == _paths(recipe.shapes):
        if "model" not in allowed_changes:
            _check_adapters(found.folder.parent, recipe, trusted)
        return jax.tree.map(lambda x, kept: x.astype(kept.dtype), model, recipe.made), name
    if has_adapters(model):
        model = jax.jit(merged)(model)
    return recipe.completed(_kept(model, recipe), mesh), name


def _recipe_of_checkpoint(
    folder: Path, there: Set[str], recipe: Recipe, trusted: Collection[str]
) -> Recipe:
    """Of the run that saved the weights `there`: `recipe`, that without adapters, or if both lack
    some of them, the run's own."""

    def plain(*, key: Any) -> Any:
        return without_adapters(recipe.model(key=key))

    if there <= _paths(recipe.bare):
        own = dataclasses.replace(recipe, model=plain, groups=None)
    elif there <= _paths(recipe.shapes) or not (folder.parent / "config.json").is_file():
        return recipe
    else:
        own = recipe_of(configs.load(str(folder.parent / "config.json"), trusted=trusted))
    dtype = "bfloat16" if own.frozen_dtype == "int8" else own.frozen_dtype
    return dataclasses.replace(own, frozen_dtype=dtype)


def recipe_of(cfg: fdl.Config) -> Recipe:
    """How a run of `cfg` makes and keeps its weights."""
    dtype = cfg.frozen_dtype or fdl.build(cfg.compute).dtype
    groups = None if cfg.trainable is None else fdl.build(cfg.trainable)
    return Recipe(fdl.build(cfg.model), cfg.seed, groups, dtype)


def _kept(model: Any, recipe: Recipe) -> Any:
    """The weights of `model` as `recipe` keeps them, one made after the other; it takes their
    buffers."""
    arrays: dict[str, jax.Array] = {}
    map_weights(lambda weight, array: arrays.update({weight.path: array}), model)

    def keep(weight: Weight, _: Any) -> Any:
        array = arrays.pop(weight.path)
        made = jax.block_until_ready(recipe.kept(weight, array.astype(jnp.float32)))
        if jax.tree.leaves(made)[0].dtype != array.dtype:
            array.delete()
        return made

    return map_weights(keep, recipe.bare)


def frozen_weights(
    notes: Mapping[str, Any],
    recipe: Recipe,
    mesh: Mesh,
    init_from: str | None = None,
    show: Callable[[str], None] = lambda line: None,
    trusted: Collection[str] = (),
) -> Any:
    """The weights of `recipe` that do not train, which no checkpoint holds: from where the run with
    the checkpoint of `notes` had them, with `None` in place of others.

    Args:
      init_from: where to look first.
      trusted: as in `weights_of`.

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
        show("reading the frozen weights, which checkpoints do not hold")
        try:
            model = _first_of([init_from, origin], recipe, mesh, show, trusted)
        except ConfigError as error:
            raise ConfigError(
                f"its frozen weights, which checkpoints do not hold, cannot be read: {error}; if "
                f"{origin} has moved, --init_from says where it is now"
            ) from error
        frozen = parted(model, recipe.trained).frozen
    if before["dtype"] == recipe.frozen_dtype and before["digest"] != fingerprint(frozen):
        raise ConfigError(
            f"the frozen weights of {origin or 'this experiment'} are not those that the run was "
            "trained with: give those that were, with --init_from"
        )
    return frozen


def frozen_note(frozen: Any, recipe: Recipe) -> dict[str, Any] | None:
    """What checkpoints keep of frozen weights; `None` if there are none."""
    if frozen is None:
        return None
    digest = fingerprint(frozen)
    return {"digest": digest, "dtype": recipe.frozen_dtype, "seed": recipe.seed}


def is_frozen_note(value: Any) -> bool:
    """Whether `frozen_note` can have returned it, of weights that there are."""
    kinds = {"digest": str, "dtype": str, "seed": int}
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(type(value[name]) is kind for name, kind in kinds.items())
    )


def _first_of(
    references: Sequence[str | None],
    recipe: Recipe,
    mesh: Mesh,
    show: Callable[[str], None],
    trusted: Collection[str],
) -> Any:
    """The model of the first reference that has one."""
    errors = []
    for reference in dict.fromkeys(each for each in references if each is not None):
        try:
            return weights_of(reference, recipe, mesh, None, ("data", "model"), show, trusted)[0]
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _paths(model: Any) -> set[str]:
    return set(named_weights(model))


def of_folder(
    found: HuggingFace,
    recipe: Recipe,
    mesh: Mesh,
    data: Source | None,
    allowed_changes: Collection[str],
    show: Callable[[str], None],
) -> Any:
    """As `weights_of`, of a folder of Hugging Face's or of PEFT's."""
    with agreed(), user_errors():
        base = base_of(found)
        adapters = None if base is found else _adapters_of(found, base, recipe)
    model = _of_whole_folder(base, recipe, mesh, data, allowed_changes, show)
    return model if adapters is None else adapters.into(model)


def _adapters_of(found: HuggingFace, base: HuggingFace, recipe: Recipe) -> Adapters:
    """Raises ConfigError if they are not those that `recipe` makes."""
    adapters = adapters_in(found.folder, recipe.bare, described(base.folder).family.names)
    _check_same_adapters(adapters.beside(recipe.bare), recipe.shapes)
    return adapters


def _check_adapters(workdir: Path, recipe: Recipe, trusted: Collection[str]) -> None:
    """Raises ConfigError if those of the run in `workdir` are not those that `recipe` makes: their
    weights do not tell alpha."""
    if (workdir / "config.json").is_file():
        cfg = configs.load(str(workdir / "config.json"), trusted=trusted)
        _check_same_adapters(recipe_of(cfg).shapes, recipe.shapes)


def _check_same_adapters(theirs: Any, ours: Any) -> None:
    one, other = _sizes(theirs), _sizes(ours)
    if one != other:
        path = next(path for path in one | other if one.get(path) != other.get(path))
        raise ConfigError(
            f"its adapters are not this experiment's ({path}: {one.get(path, 'none')}, here "
            f"{other.get(path, 'none')})"
        )


def _sizes(model: Any) -> dict[str, str]:
    """The adapters of a model, in words."""
    found: dict[str, str] = {}

    def note(path: str, one: Adapted) -> None:
        of = " of √rank" if one.rank_stabilized else ""
        found[path] = f"rank {one.rank} and alpha {one.alpha:g}{of}"

    map_adapted(note, model)
    return found


def _of_whole_folder(
    found: HuggingFace,
    recipe: Recipe,
    mesh: Mesh,
    data: Source | None,
    allowed_changes: Collection[str],
    show: Callable[[str], None],
) -> Any:
    with agreed(), user_errors():
        there = described(found.folder)
        ours = recipe.bare
        _check_same_model(there.shapes, ours, allowed_changes)
        was = tokenizer_of(found)
        problem = None
        if data is not None and tokenizers_differ(was, data.tokenizer):
            problem = f"the data was made by {data.tokenizer}"
        _check_tokenizer(problem, "data" in allowed_changes)
    tell = told(f"reading {found.name}:", show)
    weights = load_weights(found.folder, ours, there.family.names, mesh, tell, recipe.kept)
    return recipe.completed(weights, mesh)


def _check_same_model(theirs: Any, ours: Any, allowed_changes: Collection[str]) -> None:
    """Raises ConfigError if the weights of one do not fit the other, or settings differ that may
    not."""
    different = list(differences(theirs, ours))
    of_weights = [each for each in different if each.of_weights]
    if not different or (not of_weights and "model" in allowed_changes):
        return
    shown = [
        f"{each.where or 'the model'}: {each.one}, here {each.other}" for each in different[:_SHOWN]
    ]
    more = len(different) - len(shown)
    raise ConfigError(
        f"its model is not this experiment's ({'; '.join(shown)}"
        f"{f'; and {more} more' if more else ''}): experiments/from_hf takes the architecture from "
        "a folder, experiments/lora from a run too"
        + ("" if of_weights else ", --allow_change=model its weights alone")
    )


def _check_tokenizer(problem: str | None, may_differ: bool) -> None:
    if problem is not None and not may_differ:
        raise ConfigError(
            f"it was trained on other data: {problem}, so its ids mean other texts; to go on all "
            "the same give --allow_change=data"
        )
