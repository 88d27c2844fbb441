"""Checks that the data of an experiment fits its model, its objective and its mesh.

Shapes: B batch (rows), S sequence, K ids that a teacher listed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.data.batch import Batch, Source, holds_pairs, is_labelled, teacher_k
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture
from lmlib.data.resumable import Resumable
from lmlib.losses.objective import Objective
from lmlib.models.attend.kernel import kernel_of
from lmlib.models.model import check_length
from lmlib.models.split_rows import check_rows_may_be_split
from lmlib.parallel.check import check_batch
from lmlib.parallel.layout import COMPUTE, num_shards

ROWS = 8  # maximum number of rows to read

_FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "targets": np.int32,
    "segment_ids": np.int32,
    "positions": np.int32,
    "loss_mask": np.bool_,
}
_TEACHER_FIELDS: dict[str, type[np.generic]] = {
    "teacher_ids": np.int32,
    "teacher_log_probabilities": np.float16,
}


def check_first_rows(experiment: Any) -> None:
    """Checks the first rows of all training and validation data of an experiment."""
    vocab, needs_pairs = experiment.recipe.abstract_model.vocab, experiment.objective.compares_pairs
    for name, source in all_sources(experiment).items():
        check_rows(name, source, vocab, needs_pairs)


def all_sources(experiment: Any) -> dict[str, Source]:
    """Returns the sources for training and evaluation, by names for errors.

    A mixture is replaced by its parts.
    """
    named = training_sources(experiment) | validation_sources(experiment)
    return {name: part for key, each in named.items() for name, part in _parts(key, each)}


def training_sources(experiment: Any) -> dict[str, Source]:
    """Returns the training data, stage by stage, by names for errors."""
    later = {f"later_stages[{i}].data": each.data for i, each in enumerate(experiment.later_stages)}
    return {"data": experiment.data, **later}


def validation_sources(experiment: Any) -> dict[str, Source]:
    """Returns the validation data, by names for errors."""
    sets = experiment.validation_sets
    named = isinstance(experiment.validation, Mapping)
    return {f"validation[{name!r}]" if named else name: each for name, each in sets.items()}


def check_source(experiment: Any, name: str, source: Source, model: Any, microbatches: int) -> None:
    """Checks the sizes and ids of `source`, and of each part of a mixture; reads no batch."""
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
    who = type(objective).__name__
    for kind, there, needs in (
        ("pairs of answers", holds_pairs(source), objective.compares_pairs),
        ("labelled answers", bool(is_labelled(source)), objective.reads_labels),
    ):
        if there is not None and there != needs:
            raise ValueError(
                f"{name} holds {'' if there else 'no '}{kind}, and {who} needs "
                f"{'them' if needs else 'none'}: python -m data_tools.prepare_chats makes either; "
                "--pairs is for lmlib.losses.dpo.DPO, --labels for lmlib.losses.preferences.kto.KTO"
            )
    reads = objective.reads_stored_teacher
    if reads != (teacher_k(source) is not None):
        raise ValueError(
            f"{name} has {'no' if reads else 'a'} stored teacher, and {who} reads "
            f"{'one' if reads else 'none'}: set {name}.teacher to a folder of "
            "python -m runner.cache_teacher_logits for lmlib.losses.Distillation(teacher=None), "
            "else leave it out"
        )
    if isinstance(source, FlatTokens):
        _check_flat_tokens(name, source, model)


def _check_flat_tokens(name: str, source: FlatTokens, model: Any) -> None:
    # Check before allocating anything of that size.
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
    """Yields the parts of a mixture, or the source itself, by names for errors."""
    if isinstance(source, Mixture):
        for key, part in source.sources.items():
            yield from _parts(f"{name}.sources[{key!r}]", part)
    else:
        yield name, source


def check_rows(name: str, source: Source, vocab: int, needs_pairs: bool) -> None:
    """Checks the first rows of `source`, `name` in errors.

    A `Resumable` source is not checked, since reading would start its stream.
    """
    if isinstance(source, Resumable):
        return
    # Request fewer rows than there are, to notice a source that ignores `rows`.
    rows = min(ROWS, max(1, source.batch_size - 1))
    what = f"{name}.batch(0, slice(0, {rows}))"
    batch = source.batch(0, slice(0, rows))
    if not isinstance(batch, Batch):
        raise ValueError(f"{what} must be a lmlib.data.batch.Batch, got {type(batch).__name__}")
    _check_fields(what, batch, (rows, source.sequence_length), teacher_k(source))
    ids_of = {
        "tokens": np.ravel(batch.tokens),
        "targets": np.asarray(batch.targets)[np.asarray(batch.loss_mask)],
        "teacher_ids": np.ravel([] if batch.teacher_ids is None else batch.teacher_ids),
    }
    for field, ids in ids_of.items():
        if ids.size and not 0 <= (wrong := ids[np.argmax((ids < 0) | (ids >= vocab))]) < vocab:
            raise ValueError(
                f"{what}.{field} has the id {wrong}, but the model's vocabulary is 0 to "
                f"{vocab - 1}, and {name}.max_token_id is {source.max_token_id}"
            )
    for field in ("segment_ids", "positions"):
        if (lowest := getattr(batch, field).min()) < 0:
            raise ValueError(f"{what}.{field} has {lowest}: it must be at least 0")
    some = batch.loss_mask.any()
    if needs_pairs and holds_pairs(source) is None and some and not _has_pair(batch):
        raise ValueError(
            f"{what} holds no pair of answers: a pair is two segments of a row, an odd one and the "
            "next, with targets marked in both"
        )


def _check_fields(what: str, batch: Batch, shape: tuple[int, int], k: int | None) -> None:
    expected: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
        field: (shape, dtype) for field, dtype in _FIELDS.items()
    }
    if batch.labels is not None:
        expected["labels"] = (shape, np.bool_)
    if k is not None:
        expected |= {field: ((*shape, k), dtype) for field, dtype in _TEACHER_FIELDS.items()}
    for field, (size, dtype) in expected.items():
        found = getattr(batch, field)
        dtype_found = getattr(found, "dtype", None)
        if np.shape(found) != size or dtype_found != dtype:
            raise ValueError(
                f"{what}.{field} must be {np.dtype(dtype).name} of shape {size}, got "
                f"{dtype_found or type(found).__name__} of shape {np.shape(found)}"
            )
    if k is None and batch.teacher_ids is not None:
        raise ValueError(
            f"{what} has what a teacher said, but teacher_k does not say how many ids it lists"
        )


def _has_pair(batch: Batch) -> bool:
    """True if a row has targets in an odd segment and in the one after it."""
    rows, _ = np.nonzero(batch.loss_mask)
    segments = np.asarray(batch.segment_ids)[np.asarray(batch.loss_mask)]
    marked = set(zip(rows.tolist(), segments.tolist(), strict=True))
    return any(segment % 2 == 1 and (row, segment + 1) in marked for row, segment in marked)


def check_split_rows(
    model: Any, reference_model: Any, objective: Any, compute: Compute, mesh: Mesh
) -> None:
    """Checks that every part that sees a row's tokens supports rows split over `mesh`.

    See `lmlib.models.split_rows`.
    """
    axis, devices = COMPUTE["seq"], num_shards(COMPUTE["seq"], mesh)
    if devices == 1:
        return
    if compute.attention not in ("auto", "blockwise"):
        from lmlib.models.attend.context_parallel import problem  # which only split rows need

        reason = problem(kernel_of(compute.attention), compute.context_method)
        if reason is not None:
            raise ValueError(
                f"attention={compute.attention!r} cannot compute rows that {axis}={devices} "
                f"splits: {reason}; use attention='auto', or {axis}=1"
            )
    for part in (model, reference_model, objective):
        check_rows_may_be_split(part, f"{axis}={devices}")


def check_pieces(model: Any, sequence_length: int, compute: Compute, mesh: Mesh) -> None:
    """Checks that the kernel supports the pieces of rows on each device, which are shorter."""
    axis, devices = COMPUTE["seq"], num_shards(COMPUTE["seq"], mesh)
    if devices == 1:
        return
    from lmlib.models.attend.context_parallel import length_of_piece  # which only split rows need

    piece = length_of_piece(sequence_length, devices, "zigzag")
    try:
        model.check(piece, compute)
    except ValueError as error:
        raise ValueError(
            f"{axis}={devices} cuts rows of {sequence_length} tokens into pieces of {piece}: "
            f"{error}"
        ) from error
