"""Whether the parts of an experiment fit each other."""

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.data.batch import Source, teacher_k
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture
from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.evaluate.suite.suite import Suite
from lmlib.experiment.checkpoints import CheckpointSettings
from lmlib.experiment.evaluation import EvaluationSettings
from lmlib.experiment.samples import SampleSettings
from lmlib.guard import Guard
from lmlib.losses import Objective
from lmlib.models.matrices.adapted import has_adapters
from lmlib.models.protocol import check_protocol
from lmlib.parallel.check import check_batch, check_model

_KINDS = {
    "compute": Compute,
    "objective": Objective,
    "data": Source,
    "mesh": Mesh,
    "guard": Guard,
    "evaluation": EvaluationSettings,
    "evaluation.suite": Suite | None,
    "checkpoints": CheckpointSettings,
    "samples": SampleSettings,
}
_FROZEN_DTYPES = ("float32", "bfloat16", "float16", "int8")
_LEAST = {
    "steps": 1,
    "microbatches": 1,
    "prefetch_batches": 1,
    "guard.stop_after": 1,
    "guard.captures": 0,
    "evaluation.every": 1,
    "evaluation.batches": 1,
    "checkpoints.every": 1,
    "checkpoints.keep": 1,
    "checkpoints.keep_every": 1,
    "checkpoints.keep_best": 0,
    "checkpoints.tolerated_failures": 0,
    "samples.every": 1,
}


def check_experiment(experiment: Any) -> None:
    """As `lmlib.experiment.Experiment.check`, of an experiment.

    Raises:
      ValueError: naming the setting, its value, and what would work.
    """
    for name, kind in _KINDS.items():
        value = operator.attrgetter(name)(experiment)
        if not isinstance(value, kind):
            expected = getattr(kind, "__name__", kind)
            raise ValueError(f"{name} must be of type {expected}, got {value!r}")
    validation = experiment.validation
    sets = validation.values() if isinstance(validation, Mapping) else (validation,)
    if validation is not None and not all(isinstance(each, Source) for each in sets):
        raise ValueError(
            f"validation must be of type {Source | None}, or a mapping of names to such, got "
            f"{validation!r}"
        )
    for name, least in _LEAST.items():
        value = operator.attrgetter(name)(experiment)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if experiment.steps >= 2**31:
        raise ValueError(f"steps must be below 2^31, got {experiment.steps:,}")
    if not 0 <= experiment.seed < 2**32:
        raise ValueError(f"seed must be in [0, 2^32), got {experiment.seed}")
    samples = experiment.samples
    if samples.every is not None and not samples.prompts:
        raise ValueError(
            f"samples.every is {samples.every}, but there are no prompts to continue: set "
            "samples.prompts, or samples.every to None"
        )
    _check_trainable(experiment)
    model = experiment.recipe.made
    check_protocol(model)
    check_model(model, experiment.mesh)
    _check_objective(experiment, model)
    _check_source(experiment, "data", experiment.data, model, experiment.microbatches)
    batches, steps = experiment.data.batches, experiment.steps
    if batches is not None and batches < steps:
        raise ValueError(
            f"data ends after {batches} batches, but steps is {steps}: make fewer steps, or let "
            "the data repeat (epochs=None)"
        )
    if experiment.evaluation.suite is not None:
        _check_suite(experiment, model)
    if experiment.validation is not None:
        _check_validation(experiment, model)


def _check_trainable(experiment: Any) -> None:
    if experiment.frozen_dtype not in (None, *_FROZEN_DTYPES):
        raise ValueError(
            f"frozen_dtype must be one of {', '.join(_FROZEN_DTYPES)}, or None, got "
            f"{experiment.frozen_dtype!r}"
        )
    if experiment.trainable is None and experiment.frozen_dtype is not None:
        raise ValueError(
            f"frozen_dtype is {experiment.frozen_dtype!r}, but nothing is frozen: set trainable"
        )
    if experiment.trainable is None and has_adapters(experiment.recipe.shapes):
        raise ValueError(
            "the model has adapters, whose bases do not train, but trainable is None: "
            "lmlib.optim.trainable.adapters() trains the adapters alone"
        )
    experiment.optimizer(experiment.steps)
    try:
        _ = experiment.training
    except TypeError as error:
        raise ValueError(
            "a group of trainable says which weights decay, but the optimizer takes no "
            f"`decays`: {error}"
        ) from None


def _check_objective(experiment: Any, model: Any) -> None:
    recipe = experiment.reference_recipe
    reference_model = None if recipe is None else recipe.shapes
    if reference_model is not None:
        check_protocol(reference_model)
        check_model(reference_model, experiment.mesh)
        reference_model.check(experiment.data.sequence_length, experiment.compute)
    objective = experiment.objective
    objective.check(model, reference_model, experiment.recipe.trained)
    for part in _flat_tokens(experiment.data):
        if part.pairs != objective.compares_pairs:
            raise ValueError(
                f"data holds {'pairs of answers' if part.pairs else 'no pairs of answers'}, and "
                f"{type(objective).__name__} {'needs them' if objective.compares_pairs else 'none'}"
                ": python -m data_tools.prepare_chats makes either; --pairs is for lmlib.losses.DPO"
            )
    _check_stored_teacher(experiment, model)


def _check_stored_teacher(experiment: Any, model: Any) -> None:
    """Whether batches have what a teacher said where the objective needs it, and nowhere else."""
    needed = experiment.objective.reads_stored_teacher
    if needed != (teacher_k(experiment.data) is not None):
        objective = type(experiment.objective).__name__
        raise ValueError(
            f"{objective} without a teacher needs data with what one said: set data.teacher to a "
            "folder that python -m runner.teach makes"
            if needed
            else f"data has what a teacher said, and {objective} reads none of it: leave "
            "data.teacher out, or take lmlib.losses.Distillation without a teacher"
        )
    for part in _flat_tokens(experiment.data):
        if part.teacher is not None and part.teacher.vocab_size != model.vocab:
            raise ValueError(
                f"the stored teacher's vocabulary has {part.teacher.vocab_size:,} ids and the "
                f"model's {model.vocab:,}: a student has the vocabulary of its teacher, padding "
                "included"
            )


def _check_suite(experiment: Any, model: Any) -> None:
    if experiment.validation is None:
        raise ValueError("evaluation.suite is measured where validation is: set validation too")
    length, compute = experiment.suite_length, experiment.compute
    model.check(length, compute)
    check_batch(experiment.data.batch_size, length, 1, compute.sequence_parallel, experiment.mesh)


def _check_validation(experiment: Any, model: Any) -> None:
    named = isinstance(experiment.validation, Mapping)
    sets = experiment.validation_sets
    if not sets:
        raise ValueError("validation names no source: give it one, or None for none")
    for name, source in sets.items():
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
            raise ValueError(
                f"validation has the name {name!r}: a name is of letters, digits, _, . and -"
            )
        where = f"validation[{name!r}]" if named else "validation"
        _check_source(experiment, where, source, model, 1)
        if tokenizers_differ(experiment.data.tokenizer, source.tokenizer):
            raise ValueError(
                f"data was made by {experiment.data.tokenizer}, but {where} by {source.tokenizer}: "
                "their ids mean different texts; make both with one tokenizer"
            )
        if experiment.evaluation.batches is None and source.batches is None:
            raise ValueError(
                f"{where} never ends: set evaluation.batches to the number of batches that "
                "each evaluation should see"
            )
    weights = experiment.evaluation.weights
    if weights is not None:
        if not named or weights.keys() != sets.keys():
            raise ValueError(
                f"evaluation.weights are of {', '.join(map(repr, weights))}, but validation "
                f"has {', '.join(map(repr, sets)) if named else 'no names'}: name each once"
            )
        if not all(weight >= 0 for weight in weights.values()) or not sum(weights.values()) > 0:
            raise ValueError(f"evaluation.weights must be positive numbers, got {weights!r}")
    best_by = experiment.checkpoints.best_by
    if best_by not in experiment.evaluation_metrics:
        raise ValueError(
            f"checkpoints.best_by={best_by!r} is no metric of this experiment's evaluations; there "
            f"are {', '.join(experiment.evaluation_metrics)}"
        )


def _check_source(
    experiment: Any, name: str, source: Source, model: Any, microbatches: int
) -> None:
    if source.max_token_id >= model.vocab:
        raise ValueError(
            f"{name} has token ids up to {source.max_token_id}, but the model's vocabulary ends"
            f" at {model.vocab - 1}; set vocab to {source.max_token_id + 1} or more, or use the"
            " data set's own tokenizer"
        )
    _check_length(name, source)
    model.check(source.sequence_length, experiment.compute)
    check_batch(
        source.batch_size,
        source.sequence_length,
        microbatches,
        experiment.compute.sequence_parallel,
        experiment.mesh,
    )


def _check_length(name: str, source: Source) -> None:
    """Refuses sequences that are longer than all the data, before anything of that size is made."""
    for part in _flat_tokens(source):
        if part.sequence_length >= part.tokens:
            raise ValueError(
                f"{name} makes sequences of {part.sequence_length:,} tokens and has "
                f"{part.tokens:,} tokens in all: set sequence_length to {part.tokens - 1:,} or less"
            )


def _flat_tokens(source: Source) -> Iterator[FlatTokens]:
    """Those that a source reads."""
    if isinstance(source, Mixture):
        for part in source.sources.values():
            yield from _flat_tokens(part)
    elif isinstance(source, FlatTokens):
        yield source
