"""Checkpoint notes: the training data, and the weights that the checkpoint leaves out."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lmlib.checkpoint import Checkpoints, Restored
from lmlib.compute import Compute
from lmlib.data.batch import Source
from lmlib.data.stored.metadata import TokenizerIdentity, tokenizers_differ
from lmlib.parallel.fingerprint import fingerprint
from lmlib.recipe import Recipe
from runner.errors import ConfigError

WEIGHTS_ALONE = 0  # step of an untrained checkpoint from `runner.convert`


class Fork(NamedTuple):
    """The checkpoint that a forked run continues from: a folder and a step of another run.

    The forked run counts its own steps from there.
    """

    checkpoints: str
    step: int


def fork_in(notes: Mapping[str, Any]) -> Fork | None:
    """Returns the fork in checked `notes`, or `None` if the run was not forked."""
    note = notes.get("forked_from")
    return None if note is None else Fork(**note)


def frozen_note(frozen: Any, recipe: Recipe) -> dict[str, Any] | None:
    """Describes frozen weights, which checkpoints leave out; `None` if there are none."""
    if frozen is None:
        return None
    digest = fingerprint(frozen)
    return {"digest": digest, "dtype": recipe.frozen_dtype, "seed": recipe.seed}


def is_frozen_note(value: Any) -> bool:
    """True if `value` is a valid result of `frozen_note`, except `None`."""
    if not _has_fields(value, digest=str, dtype=str, seed=int):
        return False
    try:
        Compute(dtype="bfloat16" if value["dtype"] == "int8" else value["dtype"])
    except ValueError:
        return False
    return True


def reference_note(reference_model: Any) -> dict[str, str] | None:
    """Describes a reference model; `None` if there is none."""
    if reference_model is None:
        return None
    dtype = jax.tree.leaves(reference_model)[0].dtype.name
    return {"digest": fingerprint(reference_model), "dtype": dtype}


def is_batches_note(value: Any, steps_made: int) -> bool:
    """True if `value` is a valid result of `data_probe.probe` after `steps_made` steps."""
    if not isinstance(value, dict) or value.get("steps_made") != steps_made:
        return False
    tokenizer, in_bytes = value.get("tokenizer"), value.get("bytes_per_target")
    names = {field.name for field in dataclasses.fields(TokenizerIdentity)}
    sizes = (value.get(name, 1) for name in ("batch_size", "sequence_length"))
    return (
        (tokenizer is None or (isinstance(tokenizer, dict) and tokenizer.keys() == names))
        and (in_bytes is None or type(in_bytes) in (int, float))
        and all(isinstance(value.get(name, ""), str) for name in ("first", "last"))
        and all(type(size) is int and 0 < size < 1 << 31 for size in sizes)
        and ("first" in value) == ("last" in value)
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
    notes = found.notes
    checks = {
        "tokens": lambda tokens: type(tokens) is int and 0 <= tokens < 1 << 63,
        "before_skipped": lambda step: (
            step is None or (type(step) is int and 0 <= step <= found.step)
        ),
        "batches": lambda note: is_batches_note(note, found.step),
        "initialised_from": lambda origin: origin is None or isinstance(origin, str),
        "frozen": lambda note: note is None or is_frozen_note(note),
        "reference_model": lambda note: note is None or _has_fields(note, digest=str, dtype=str),
    }
    if missing := checks.keys() - notes.keys():
        raise ConfigError(
            f"checkpoint {found.step} was saved by another version of the runner: its notes "
            f"have no {', '.join(sorted(missing))}; take its weights with --init_from into another "
            "workdir"
        )
    checks["forked_from"] = lambda fork: (
        fork is None
        or (_has_fields(fork, checkpoints=str, step=int) and 0 < fork["step"] <= found.step)
    )
    if wrong := [name for name, is_sound in checks.items() if not is_sound(notes.get(name))]:
        values = ", ".join(f"{name}={notes.get(name)!r:.80}" for name in wrong)
        raise ConfigError(
            f"the notes of checkpoint {directory / str(found.step)} make no sense: {values}; "
            "delete it to go on from the one before, or take its weights with --init_from into "
            "another workdir"
        )


def _has_fields(value: Any, **kinds: type) -> bool:
    """True if `value` is a dict with exactly these names and types."""
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(type(value[name]) is kind for name, kind in kinds.items())
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
