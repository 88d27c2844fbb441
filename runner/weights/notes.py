"""What a checkpoint says beside its arrays: what they were trained on, and what it leaves out."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lmlib.checkpoint import Restored
from lmlib.compute import Compute
from lmlib.data.batch import Source
from lmlib.data.stored.metadata import TokenizerIdentity, tokenizers_differ
from lmlib.parallel.fingerprint import fingerprint
from lmlib.recipe import Recipe
from runner.errors import ConfigError

WEIGHTS_ALONE = 0  # the step of a checkpoint of weights alone: `runner.convert` makes it, no run

_NAMES = {"tokens", "before_skipped", "batches", "initialised_from", "frozen", "reference_model"}


class Fork(NamedTuple):
    """Where a run goes on from that was forked: the folder of another run's checkpoints, and which
    of them. It counts its steps from there."""

    checkpoints: str
    step: int


def fork_in(notes: Mapping[str, Any]) -> Fork | None:
    """That of the run whose checkpoint has these `notes`, which were checked; `None` if it began by
    itself."""
    note = notes.get("forked_from")
    return None if note is None else Fork(**note)


def frozen_note(frozen: Any, recipe: Recipe) -> dict[str, Any] | None:
    """What checkpoints keep of frozen weights; `None` if there are none."""
    if frozen is None:
        return None
    digest = fingerprint(frozen)
    return {"digest": digest, "dtype": recipe.frozen_dtype, "seed": recipe.seed}


def is_frozen_note(value: Any) -> bool:
    """Whether `frozen_note` can have returned it, of weights that there are."""
    if not _has_fields(value, digest=str, dtype=str, seed=int):
        return False
    try:
        Compute(dtype="bfloat16" if value["dtype"] == "int8" else value["dtype"])
    except ValueError:
        return False
    return True


def reference_note(reference_model: Any) -> dict[str, str] | None:
    """What checkpoints keep of a reference model; `None` if there is none."""
    if reference_model is None:
        return None
    dtype = jax.tree.leaves(reference_model)[0].dtype.name
    return {"digest": fingerprint(reference_model), "dtype": dtype}


def is_batches_note(value: Any, steps_made: int) -> bool:
    """Whether `runner.training.data_probe.probe` can have returned it after so many steps."""
    if not isinstance(value, dict) or value.get("steps_made") != steps_made:
        return False
    tokenizer, in_bytes = value.get("tokenizer"), value.get("bytes_per_target")
    names = {field.name for field in dataclasses.fields(TokenizerIdentity)}
    return (
        (tokenizer is None or (isinstance(tokenizer, dict) and tokenizer.keys() == names))
        and (in_bytes is None or type(in_bytes) in (int, float))
        and all(isinstance(value.get(name, ""), str) for name in ("first", "last"))
        and all(_is_size(value.get(name, 1)) for name in ("batch_size", "sequence_length"))
        and ("first" in value) == ("last" in value)
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def tokenizer_in(batches: Any) -> TokenizerIdentity | None:
    """What made the ids of the batches that a note tells of; `None` if it does not say."""
    known = batches.get("tokenizer") if isinstance(batches, Mapping) else None
    try:
        return TokenizerIdentity(**known) if isinstance(known, Mapping) else None
    except TypeError:
        return None


def tokenizer_changed(source: Source, batches: Mapping[str, Any]) -> str | None:
    """How the tokenizer differs from that of the note, in words; `None` if none is known to."""
    was = tokenizer_in(batches)
    if tokenizers_differ(was, source.tokenizer):
        return f"it was made by the tokenizer {was}, and this by {source.tokenizer}"
    return None


def check_notes(found: Restored, directory: Path) -> None:
    """Raises ConfigError if the notes of a checkpoint in `directory` are not what a run saves."""
    if missing := _NAMES - found.notes.keys():
        raise ConfigError(
            f"checkpoint {found.step} was saved by another version of the runner: its notes "
            f"have no {', '.join(sorted(missing))}; take its weights with --init_from into another "
            "workdir"
        )
    tokens, before, batches, origin, frozen, reference = (
        found.notes[name]
        for name in (
            *("tokens", "before_skipped", "batches"),
            *("initialised_from", "frozen", "reference_model"),
        )
    )
    fork = found.notes.get("forked_from")
    sensible = {
        "tokens": type(tokens) is int and 0 <= tokens < 1 << 63,
        "before_skipped": before is None or (type(before) is int and 0 <= before <= found.step),
        "batches": is_batches_note(batches, found.step),
        "initialised_from": origin is None or isinstance(origin, str),
        "frozen": frozen is None or is_frozen_note(frozen),
        "reference_model": reference is None or _has_fields(reference, digest=str, dtype=str),
        "forked_from": fork is None
        or (_has_fields(fork, checkpoints=str, step=int) and 0 < fork["step"] <= found.step),
    }
    if wrong := [name for name, is_sensible in sensible.items() if not is_sensible]:
        values = ", ".join(f"{name}={found.notes.get(name)!r:.80}" for name in wrong)
        raise ConfigError(
            f"the notes of checkpoint {directory / str(found.step)} make no sense: {values}; "
            "delete it to go on from the one before, or take its weights with --init_from into "
            "another workdir"
        )


def _has_fields(value: Any, **kinds: type) -> bool:
    """Whether it is a dict of exactly these names, each with a value of its type."""
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(type(value[name]) is kind for name, kind in kinds.items())
    )
