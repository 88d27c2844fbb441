"""Checks that the parts of an experiment fit each other."""

import operator
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.experiment.annotations import check_fields
from lmlib.experiment.sources import (
    check_source,
    check_split_rows,
    training_sources,
    validation_sources,
)
from lmlib.models.forward_context import single_document_context
from lmlib.models.matrices.lora import has_adapters
from lmlib.models.model import check_is_model, check_length
from lmlib.models.part import Part
from lmlib.optim.optimizer import Optimizer
from lmlib.parallel.check import check_batch, check_model
from lmlib.recipe import MATRICES

_SETTINGS = ("compute", "guard", "evaluation", "checkpoints", "samples")
_FROZEN_DTYPES = ("float32", "bfloat16", "float16", *MATRICES)
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
    """Implements `lmlib.experiment.Experiment.check`."""
    check_fields("", experiment)
    for name in _SETTINGS:
        check_fields(name, getattr(experiment, name))
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
    model = experiment.recipe.abstract_model
    check_is_model(model)
    check_model(model, experiment.mesh)
    device = experiment.mesh.devices.flat[0]  # other kernels are emulated where they lack support
    if experiment.compute.attention == "cudnn" and device.platform != "gpu":
        raise ValueError(
            "compute.attention is 'cudnn', which runs on NVIDIA GPUs, and the devices are "
            f"{device.device_kind}: use 'auto'"
        )
    if "mxfp8" in (experiment.compute.quantized or {}).values():
        from lmlib.models.matrices.mxfp8 import check_devices

        check_devices(experiment.mesh)
    _check_gradients(experiment)
    _check_objective(experiment, model)
    _check_model_losses(experiment)
    _check_stages(experiment, model)
    if experiment.evaluation.suite is not None:
        if experiment.validation is None:
            raise ValueError("evaluation.suite is measured where validation is: set validation too")
        length, compute = experiment.suite_length, experiment.compute
        check_length(model, length, compute)
        check_batch(experiment.data.batch_size, length, 1, compute, experiment.mesh)
    if experiment.validation is not None:
        _check_validation(experiment, model)


def _check_stages(experiment: Any, model: Any) -> None:
    """Checks the training data, stage by stage."""
    names = training_sources(experiment)
    for (name, source), (steps, stage) in zip(
        names.items(), experiment.stages.items(), strict=True
    ):
        if stage.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {stage.microbatches}")
        check_source(experiment, name, source, model, stage.microbatches)
        batches = stage.data.batches
        if batches is not None and batches < steps.stop:
            raise ValueError(
                f"{name} ends after {batches} batches, but steps is {steps.stop}: make fewer "
                "steps, or let the data repeat (epochs=None)"
            )


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
    made = experiment.optimizer(experiment.steps)
    if not isinstance(made, Optimizer):
        raise ValueError(
            f"optimizer(steps) must return a lmlib.optim.Optimizer, got a {type(made).__name__}; "
            "lmlib.optim.from_optax makes one of a transformation of optax's"
        )
    try:
        _ = experiment.training
    except TypeError as error:
        raise ValueError(
            "a group of trainable says which weights decay, which an optimizer takes as `decays`, "
            f"or scaling is set, which it takes as `scaled`, and this one does not: {error}"
        ) from None


def _check_gradients(experiment: Any) -> None:
    """Refuses to train weights that get no gradient from the loss."""

    def problem_of(node: Any) -> str | None:
        return node.gradient_problem if isinstance(node, Part) else None

    trained = experiment.recipe.trained
    nodes = jax.tree_util.tree_leaves_with_path(
        experiment.recipe.shapes, is_leaf=lambda node: problem_of(node) is not None
    )
    for keys, part in nodes:
        problem, path = problem_of(part), jax.tree_util.keystr(keys, simple=True, separator=".")
        trains = trained is None or any(each.startswith(f"{path}.") for each in trained)
        if problem is not None and trains:
            raise ValueError(
                f"{path} would get no gradient from the loss: {problem}; or leave it out of "
                "trainable"
            )


def _check_objective(experiment: Any, model: Any) -> None:
    recipe = experiment.reference_recipe
    reference_model = None if recipe is None else recipe.shapes
    if reference_model is not None:
        check_is_model(reference_model)
        check_model(reference_model, experiment.mesh)
    objective, compute, mesh = experiment.objective, experiment.compute, experiment.mesh
    check_split_rows(model, reference_model, objective, compute, mesh)
    trained = experiment.recipe.trained
    objective.check(model, reference_model, trained)
    trains_heads = trained is None or any(path.startswith("predictors.") for path in trained)
    if hasattr(model, "predictors") and trains_heads and not objective.trains_predictors:
        raise ValueError(
            "predictors would get no gradient from the loss: heads of multi-token prediction train "
            "with the objective lmlib.losses.multi_token.MultiToken; or leave them out of trainable"
        )


def _check_model_losses(experiment: Any) -> None:
    wanted = experiment.objective.model_losses
    if not wanted:
        return
    tokens_BS = jnp.zeros((1, experiment.data.sequence_length), jnp.int32)
    context = single_document_context(tokens_BS, experiment.compute)
    trunk = jax.eval_shape(lambda model: model.trunk(tokens_BS, context), experiment.recipe.shapes)
    for name in wanted:
        if name not in trunk.aux.losses:
            reported = ", ".join(trunk.aux.losses) or "no losses"
            raise ValueError(
                f"objective.model_losses has {name!r}, but the model reports {reported}"
            )


def _check_validation(experiment: Any, model: Any) -> None:
    named = isinstance(experiment.validation, Mapping)
    sets = experiment.validation_sets
    if not sets:
        raise ValueError("validation names no source: give it one, or None for none")
    for name in sets:
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
            raise ValueError(
                f"validation has the name {name!r}: a name has letters, digits, _, . and -"
            )
    for where, source in validation_sources(experiment).items():
        check_source(experiment, where, source, model, 1)
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
            f"checkpoints.best_by={best_by!r} is not a metric of this experiment's evaluations; "
            f"there are {', '.join(experiment.evaluation_metrics)}"
        )
