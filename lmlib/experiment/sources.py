"""Whether what an experiment reads fits its model and its objective."""

from collections.abc import Iterator, Mapping
from typing import Any

from lmlib.data.batch import Source, holds_pairs, teacher_k
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture
from lmlib.experiment import first_rows
from lmlib.experiment.split_rows import check_pieces
from lmlib.losses.objective import Objective
from lmlib.models.model import check_length
from lmlib.parallel.check import check_batch


def check_first_rows(experiment: Any) -> None:
    """Reads the first rows of all that an experiment trains and validates on.

    Raises:
      ValueError: naming the source and what is wrong in its rows.
    """
    vocab, needs_pairs = experiment.recipe.made.vocab, experiment.objective.compares_pairs
    for name, source in all_sources(experiment).items():
        first_rows.check_first_rows(name, source, vocab, needs_pairs)


def all_sources(experiment: Any) -> dict[str, Source]:
    """The sources for training and evaluation, by their names in errors. A mixture is replaced by
    the sources that it mixes."""
    named = training_sources(experiment) | validation_sources(experiment)
    return {name: part for key, each in named.items() for name, part in _parts(key, each)}


def training_sources(experiment: Any) -> dict[str, Source]:
    """What is trained on, stage by stage, by its name in errors."""
    later = {f"later_stages[{i}].data": each.data for i, each in enumerate(experiment.later_stages)}
    return {"data": experiment.data, **later}


def validation_sources(experiment: Any) -> dict[str, Source]:
    """What is evaluated on, by its name in errors."""
    sets = experiment.validation_sets
    named = isinstance(experiment.validation, Mapping)
    return {f"validation[{name!r}]" if named else name: each for name, each in sets.items()}


def check_source(experiment: Any, name: str, source: Source, model: Any, microbatches: int) -> None:
    """Checks what `source` says of itself, and each that it mixes; reads no batch.

    Args:
      name: of the source in errors.

    Raises:
      ValueError: if it does not fit the model, the objective or the mesh.
    """
    for where, part in _parts(name, source):
        _check_part(where, part, experiment.objective, model)
    recipe = experiment.reference_recipe
    for each in (model, *([] if recipe is None else [recipe.shapes])):
        check_length(each, source.sequence_length, experiment.compute)
    check_batch(
        source.batch_size,
        source.sequence_length,
        microbatches,
        experiment.compute,
        experiment.mesh,
    )
    check_pieces(model, source.sequence_length, experiment.compute, experiment.mesh)


def _check_part(name: str, source: Source, objective: Objective, model: Any) -> None:
    for size in ("batch_size", "sequence_length"):
        value = getattr(source, size)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}.{size} must be an integer of at least 1, got {value!r}")
    if source.max_token_id >= model.vocab:
        raise ValueError(
            f"{name} has token ids up to {source.max_token_id}, but the model's vocabulary ends"
            f" at {model.vocab - 1}; set vocab to {source.max_token_id + 1} or more, or use the"
            " data set's own tokenizer"
        )
    who, pairs = type(objective).__name__, holds_pairs(source)
    if pairs is not None and pairs != objective.compares_pairs:
        raise ValueError(
            f"{name} holds {'pairs of answers' if pairs else 'no pairs of answers'}, and "
            f"{who} {'needs them' if objective.compares_pairs else 'none'}"
            ": python -m data_tools.prepare_chats makes either; --pairs is for lmlib.losses.DPO"
        )
    if objective.reads_stored_teacher and teacher_k(source) is None:
        raise ValueError(
            f"{who} without a teacher needs {name} with what one said: set {name}.teacher to a "
            "folder that python -m runner.teach makes"
        )
    if not objective.reads_stored_teacher and teacher_k(source) is not None:
        raise ValueError(
            f"{name} has what a teacher said, and {who} reads none of it: leave "
            f"{name}.teacher out, or take lmlib.losses.Distillation without a teacher"
        )
    if isinstance(source, FlatTokens):
        _check_flat_tokens(name, source, model)


def _check_flat_tokens(name: str, source: FlatTokens, model: Any) -> None:
    # Before anything of that size is made.
    if source.sequence_length >= source.tokens:
        raise ValueError(
            f"{name} makes sequences of {source.sequence_length:,} tokens and has "
            f"{source.tokens:,} tokens in all: set sequence_length to {source.tokens - 1:,} or less"
        )
    if source.teacher is not None and source.teacher.vocab_size != model.vocab:
        raise ValueError(
            f"the stored teacher's vocabulary has {source.teacher.vocab_size:,} ids and the "
            f"model's {model.vocab:,}: a student has the vocabulary of its teacher, padding "
            "included"
        )


def _parts(name: str, source: Source) -> Iterator[tuple[str, Source]]:
    """The sources that a source mixes, or itself, by their names in errors."""
    if isinstance(source, Mixture):
        for key, part in source.sources.items():
            yield from _parts(f"{name}.sources[{key!r}]", part)
    else:
        yield name, source
