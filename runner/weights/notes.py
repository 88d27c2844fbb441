"""Checkpoint notes: the training data, and the weights that the checkpoint leaves out."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lmlib.checkpoint import Checkpoints, Restored
from lmlib.data.batch import Source
from lmlib.data.stored.metadata import TokenizerIdentity, tokenizers_differ
from lmlib.experiment.annotations import fits
from lmlib.parallel.fingerprint import fingerprint
from lmlib.recipe import MATRICES, Recipe
from runner.config.text import changed_paths
from runner.errors import ConfigError

WEIGHTS_ALONE = 0  # step of an untrained checkpoint from `runner.convert`
_DTYPES = ("float32", "bfloat16", "float16", *MATRICES)  # of frozen weights


class Fork(NamedTuple):
    """The checkpoint that a forked run continues from: a folder and a step of another run.

    The forked run counts its own steps from there.
    """

    checkpoints: str
    step: int


def frozen_note(frozen: Any, recipe: Recipe) -> dict[str, Any] | None:
    """Describes frozen weights, which checkpoints leave out; `None` if there are none."""
    if frozen is None:
        return None
    digest = fingerprint(frozen)
    return {"digest": digest, "dtype": recipe.frozen_dtype, "seed": recipe.seed}


def is_frozen_note(value: Any) -> bool:
    """True if `value` is a valid result of `frozen_note`, except `None`."""
    return _has(value, digest=str, dtype=str, seed=int) and value["dtype"] in _DTYPES


def reference_note(reference_model: Any) -> dict[str, str] | None:
    """Describes a reference model; `None` if there is none."""
    if reference_model is None:
        return None
    dtype = jax.tree.leaves(reference_model)[0].dtype.name
    return {"digest": fingerprint(reference_model), "dtype": dtype}


def is_batches_note(value: Any, steps_made: int) -> bool:
    """True if `value` is a valid result of `data_probe.probe` after `steps_made` steps."""
    optional = {"batch_size": int, "sequence_length": int, "first": str, "last": str}
    kinds = {
        name: kind for name, kind in optional.items() if isinstance(value, dict) and name in value
    }
    return (
        _has(
            value,
            tokenizer=dict[str, str | None] | None,
            bytes_per_target=float | None,
            steps_made=int,
            **kinds,
        )
        and ("first" in kinds) == ("last" in kinds)
        and value["steps_made"] == steps_made
        and (value["tokenizer"] is None or tokenizer_in(value) is not None)
        and all(0 < value.get(size, 1) < 1 << 31 for size in ("batch_size", "sequence_length"))
    )


def tokenizer_in(batches: Any) -> TokenizerIdentity | None:
    """Returns the tokenizer in a note of batches, or `None`."""
    known = batches.get("tokenizer") if isinstance(batches, Mapping) else None
    try:
        return TokenizerIdentity(**known) if isinstance(known, Mapping) else None
    except TypeError:
        return None


def tokenizer_changed(source: Source, batches: Mapping[str, Any]) -> str | None:
    """Returns a message if the source's tokenizer differs from the one in the note, else `None`."""
    was = tokenizer_in(batches)
    if tokenizers_differ(was, source.tokenizer):
        return f"it was made by the tokenizer {was}, and this by {source.tokenizer}"
    return None


def check_notes(found: Restored, directory: Path) -> None:
    """Raises ConfigError if a run did not save the notes of a checkpoint in `directory`."""
    notes, step = found.notes, found.step
    in_other = "take its weights with --init_from into another workdir"
    try:
        tokens, skipped, fork = notes["tokens"], notes["before_skipped"], notes.get("forked_from")
        sound = {
            "tokens": fits(tokens, int) and 0 <= tokens < 1 << 63,
            "before_skipped": fits(skipped, int | None) and 0 <= (skipped or 0) <= step,
            "batches": is_batches_note(notes["batches"], step),
            "initialised_from": fits(notes["initialised_from"], str | None),
            "frozen": notes["frozen"] is None or is_frozen_note(notes["frozen"]),
            "reference_model": notes["reference_model"] is None
            or _has(notes["reference_model"], digest=str, dtype=str),
            "forked_from": fork is None
            or (_has(fork, checkpoints=str, step=int) and 0 < fork["step"] <= step),
        }
    except KeyError as error:
        raise ConfigError(
            f"checkpoint {step} was saved by another version of the runner: its notes have no "
            f"{error.args[0]}; {in_other}"
        ) from error
    if wrong := [name for name, is_sound in sound.items() if not is_sound]:
        values = ", ".join(f"{name}={notes.get(name)!r:.80}" for name in wrong)
        raise ConfigError(
            f"the notes of checkpoint {directory / str(step)} are invalid: {values}; delete it "
            f"to continue from the one before, or {in_other}"
        )


def check_same_model(
    name: str,
    before: Mapping[str, str] | None,
    now: Mapping[str, str],
    allowed_changes: Collection[str],
    weights_fit: Callable[[], bool],
) -> None:
    """Compares the model's settings with the settings of a run called `name`, if they are known."""
    changed = [] if before is None else changed_paths(before, now)
    of_the_model = [path for path in changed if path.partition(".")[0] == "model"]
    if of_the_model and "model" not in allowed_changes:
        remedy = "use another workdir (--init_from takes the weights there), or give "
        remedy += "--allow_change=model"
        others = "their shapes differ too: use another workdir"
        raise ConfigError(
            f"{', '.join(of_the_model)} changed since {name} was trained, so its weights belong "
            f"to another model; {remedy if weights_fit() else others}"
        )


def _has(value: Any, **kinds: Any) -> bool:
    """True if `value` is a dict with exactly these names, and values of these types."""
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(fits(value[name], kind) for name, kind in kinds.items())
    )


def save_weights_alone(
    weights: Any, workdir: Path, tokenizer: TokenizerIdentity | None, **notes: Any
) -> None:
    """Saves `weights` in `workdir` as a checkpoint at step 0, from which runs can begin.

    Args:
      tokenizer: the tokenizer of the model's ids; `None` if unknown.
      notes: `initialised_from` and `frozen`, if they apply, and others.
    """
    batches = {
        "tokenizer": tokenizer and dataclasses.asdict(tokenizer),
        "bytes_per_target": None,
        "steps_made": WEIGHTS_ALONE,
    }
    nothing = dict.fromkeys(("before_skipped", "initialised_from", "frozen", "reference_model"))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        every = {"tokens": 0, "batches": batches, **nothing, **notes}
        checkpoints.save(WEIGHTS_ALONE, {"model": weights}, every)
