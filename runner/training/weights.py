"""The weights that a reference means, made into the model of a run."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh

from lmlib import train
from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import Source
from lmlib.data.metadata import tokenizers_differ
from lmlib.fingerprint import fingerprint
from lmlib.hf.families import described
from lmlib.hf.load import load_weights
from lmlib.hf.peft import Adapters, adapters_in
from lmlib.models.adapted import Adapted, map_adapted, without_adapters
from lmlib.models.differences import differences
from lmlib.parallel.layout import creator
from lmlib.parallel.selection import named_weights
from lmlib.recipe import Recipe, parted
from lmlib.trainable import Group
from runner.command_line.errors import ConfigError, in_words, user_errors
from runner.processes.agreement import agreed
from runner.training import data_probe
from runner.training.references import HuggingFace, Saved, base_of, located, tokenizer_of
from runner.watch.transfer import told

WEIGHTS_ALONE = 0  # the step of a checkpoint of weights alone: `runner.convert` makes it, no run
_SHOWN = 6  # differences


def weights_of(
    reference: str,
    recipe: Recipe,
    mesh: Mesh,
    data: Source | None,
    allowed_changes: Collection[str] = (),
    show: Callable[[str], None] = lambda line: None,
) -> tuple[Any, str]:
    """The model of `recipe` with the weights that `reference` means, laid out on `mesh`, and whose
    they are: `run@step` or the folder. Adapters that are not there are new.

    Args:
      reference: as of `located`.
      data: whose ids the model must know; `None`: any.
      allowed_changes: "data": its tokenizer may be another than the data's. "model": settings of
        the model in a folder of Hugging Face's may be others, where its weights fit.
      show: gets a line now and then while a folder is read.

    Raises:
      ConfigError: if there is none, it is damaged, or it holds another model or was trained on
        another tokenizer's ids.
    """
    with agreed():
        found = located(reference)
    try:
        if isinstance(found, Saved):
            return _of_run(found, recipe, mesh, data, allowed_changes, show)
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
) -> tuple[Any, str]:
    with Checkpoints(found.folder, read_only=True) as checkpoints:
        step = checkpoints.newest() if found.step is None else found.step
        if step is None:
            raise ConfigError(f"{found.folder} holds no checkpoint")
        there = checkpoints.names(step, "model")
        everything, adapted = _paths(recipe.given), _paths(recipe.shapes)
        # A model that trained in part left the rest where it came from.
        in_part = not everything <= there <= adapted
        shapes = recipe.shapes if in_part else without_adapters(recipe.shapes)
        target = train.abstract_model(lambda: shapes, mesh)
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
    if not in_part:
        return recipe.completed(model, mesh), name
    rest = frozen_weights(
        notes, dataclasses.replace(recipe, groups={"there": Group(tuple(there))}), mesh, (), show
    )
    model, wanted = eqx.combine(model, rest), recipe.made
    return jax.tree.map(lambda x, kept: x.astype(kept.dtype), model, wanted), name


def frozen_weights(
    notes: Mapping[str, Any],
    recipe: Recipe,
    mesh: Mesh,
    references: Sequence[str | None] = (),
    show: Callable[[str], None] = lambda line: None,
) -> Any:
    """The weights of `recipe` that do not train, which no checkpoint holds: from where the run with
    the checkpoint of `notes` had them, with `None` in place of others.

    Args:
      references: where to look first.

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
        model = _first_of([*references, origin], recipe, mesh, show)
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
    references: Sequence[str | None], recipe: Recipe, mesh: Mesh, show: Callable[[str], None]
) -> Any:
    """The model of the first reference that has one."""
    errors = []
    for reference in dict.fromkeys(each for each in references if each is not None):
        try:
            return weights_of(reference, recipe, mesh, None, ("data", "model"), show)[0]
        except ConfigError as error:
            errors.append(error)
    raise errors[-1]


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
    adapters = adapters_in(found.folder, recipe.given, described(base.folder).family.names)
    one, other = _sizes(adapters.beside(recipe.given)), _sizes(recipe.shapes)
    if one != other:
        path = next(path for path in one | other if one.get(path) != other.get(path))
        raise ConfigError(
            f"its adapters are not this experiment's ({path}: {one.get(path, 'none')}, here "
            f"{other.get(path, 'none')})"
        )
    return adapters


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
        ours = recipe.given
        theirs = jax.eval_shape(there.build, jax.random.key(0))
        different = list(differences(theirs, ours))
        of_weights = [each for each in different if each.of_weights]
        if different and (of_weights or "model" not in allowed_changes):
            shown = [
                f"{each.where or 'the model'}: {each.one}, here {each.other}"
                for each in different[:_SHOWN]
            ]
            more = len(different) - len(shown)
            raise ConfigError(
                f"its model is not this experiment's ({'; '.join(shown)}"
                f"{f'; and {more} more' if more else ''}): experiments/from_hf takes the "
                "architecture from the folder"
                + ("" if of_weights else ", --allow_change=model its weights alone")
            )
        was = tokenizer_of(found)
        problem = None
        if data is not None and tokenizers_differ(was, data.tokenizer):
            problem = f"the data was made by {data.tokenizer}"
        _check_tokenizer(problem, "data" in allowed_changes)
    tell = told(f"reading {found.name}:", show)
    return recipe.completed(load_weights(found.folder, ours, there.family.names, mesh, tell), mesh)


def _check_tokenizer(problem: str | None, may_differ: bool) -> None:
    if problem is not None and not may_differ:
        raise ConfigError(
            f"it was trained on other data: {problem}, so its ids mean other texts; to go on all "
            "the same give --allow_change=data"
        )
