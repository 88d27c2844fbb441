"""The settings of a training run, as objects."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch, Source, has_whole_rows, is_labelled, teacher_k
from lmlib.data.text import HasText, TextCodec
from lmlib.evaluate.validation import validation_metrics
from lmlib.experiment.actions import Action, PeriodicCallback, StepEvent
from lmlib.experiment.checkpoints import CheckpointSettings
from lmlib.experiment.checks import check_experiment
from lmlib.experiment.evaluation import EvaluationSettings
from lmlib.experiment.samples import SampleSettings
from lmlib.experiment.stages import DataStage, at, batches_of, spans_of
from lmlib.guard import Guard
from lmlib.hardware.free_memory import check_fits
from lmlib.losses.next_token import NextToken
from lmlib.losses.objective import Objective
from lmlib.metrics.sinks import MakeSink
from lmlib.models.matrices.lora import without_adapters
from lmlib.optim.average import Averaging
from lmlib.optim.optimizer import Optimizer
from lmlib.optim.trainable import Groups, decays_by, flops_per_token, with_rates
from lmlib.optim.transfer import CompleteP, Scaled
from lmlib.recipe import Recipe
from lmlib.state import (
    State,
    Training,
    abstract_batch,
    abstract_model,
    abstract_state,
    initial_state,
)
from lmlib.train import trace_step

__all__ = [
    "Action",
    "CheckpointSettings",
    "DataStage",
    "EvaluationSettings",
    "Experiment",
    "PeriodicCallback",
    "SampleSettings",
    "StepEvent",
]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of a training run.

    Args:
      model: `model(key=…)` makes the model, a `lmlib.models.model.Model`. Its arguments identify
        the run, which cannot continue with others.
      data: training batches, up to the first of `later_stages`.
      optimizer: `optimizer(steps)` makes the optimizer.
      mesh: the devices.
      steps: number of updates.
      later_stages: batches of other sizes or with other rows, each from some step on.
      compute: dtypes, kernels and other settings of the computation.
      objective: the training objective.
      scaling: derives the optimizer's hyperparameters and the initial weights from those of a
        smaller model; `None` uses them unchanged.
      trainable: the weights that train, in groups by name. The others are frozen: they have no
        gradient, no moments and no float32 copy. `None` trains all.
      frozen_dtype: dtype of frozen weights; "int8" keeps matrices in 8 bits, and "nf4" and "mxfp4"
        in 4 bits. `None` takes the compute dtype.
      average: an average of the trained weights, kept in the state; `None` for none.
      microbatches: parts of a batch whose gradients are accumulated for one update.
      guard: decides which updates are skipped.
      seed: of the initial weights, in [0, 2^32).
      init_from: source of the initial weights: a run, `RUN` or `RUN@STEP`, a Hugging Face folder,
        or a name on the Hub; `None` for new ones. Ignored if the run has checkpoints of its own.
      continue_optimizer: True makes the run a fork of `init_from`, a `RUN@STEP`, with that run's
        optimizer state and counts. Its first step is STEP + 1, and `steps` counts from 1.
      validation: evaluation batches in a fixed order: a source, or several by name; `None` for
        none.
      evaluation: when and how the model is evaluated.
      checkpoints: when the run is saved, and which checkpoints are kept.
      samples: texts that the model continues.
      actions: further periodic actions, called in order after all of the above.
      sinks: functions that make receivers of metrics, in addition to metrics.jsonl and TensorBoard.
      prefetch_batches: batches that are read and placed on the devices ahead of their step.
    """

    model: Callable[..., Any]
    data: Source
    optimizer: Callable[[int], Optimizer]
    mesh: Mesh
    steps: int
    later_stages: Sequence[DataStage] = ()
    compute: Compute = Compute()
    objective: Objective = NextToken()
    scaling: CompleteP | None = None
    trainable: Groups | None = None
    frozen_dtype: str | None = None
    average: Averaging | None = None
    microbatches: int = 1
    guard: Guard = Guard()
    seed: int = 0
    init_from: str | None = None
    continue_optimizer: bool = False
    validation: Source | Mapping[str, Source] | None = None
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    samples: SampleSettings = SampleSettings()
    actions: Sequence[PeriodicCallback] = ()
    sinks: Sequence[MakeSink] = ()
    prefetch_batches: int = 2

    @functools.cached_property
    def batches(self) -> Source:
        """Returns all batches of the run; the sizes are the first stage's.

        Raises ValueError if stages are not in order or do not fit each other.
        """
        return batches_of(self.data, self.later_stages, self.steps)

    @functools.cached_property
    def stages(self) -> dict[range, "Experiment"]:
        """Returns an experiment with batches of one size for each stage.

        The keys are the stage's steps, counted from 0. All have the same recipes and optimizer.
        """
        if not self.later_stages:
            return {range(self.steps): self}
        counts = [None, *(stage.microbatches for stage in self.later_stages)]
        spans = zip(spans_of(self.batches, self.steps).items(), counts, strict=True)
        return {
            steps: self._with_batches(source, self.microbatches if count is None else count)
            for (steps, source), count in spans
        }

    def at(self, step: int) -> "Experiment":
        """Returns the experiment of the stage that contains `step`, counted from 0."""
        return at(self.stages, step)

    def _with_batches(self, data: Source, microbatches: int) -> "Experiment":
        made = dataclasses.replace(self, data=data, microbatches=microbatches, later_stages=())
        training = dataclasses.replace(self.training, microbatches=microbatches)
        # Made once, so that the train steps of all stages take the same trees.
        shared = {"recipe": self.recipe, "reference_recipe": self.reference_recipe}
        vars(made).update(shared, training=training)
        return made

    @functools.cached_property
    def recipe(self) -> Recipe:
        """Returns the recipe that initialises and stores the model's weights."""
        dtype = self.frozen_dtype or self.compute.dtype
        return Recipe(self._new_model, self.seed, self.trainable, dtype)

    @functools.cached_property
    def reference_recipe(self) -> Recipe | None:
        """Returns the recipe of the objective's frozen reference model; `None` if it needs none."""
        wanted = self.objective.reference_model
        if wanted is None:
            return None
        make = wanted.model or (lambda *, key: without_adapters(self._new_model(key=key)))
        return Recipe(make, self.seed + 1, {}, self.compute.dtype)

    @functools.cached_property
    def training(self) -> Training:
        """Returns the settings of the train step."""
        return Training(
            self._made_optimizer(),
            self.mesh,
            self.compute,
            self.objective,
            self.guard,
            self.microbatches,
            self.seed,
            self.recipe.trained,
        )

    @functools.cached_property
    def scaled(self) -> Scaled | None:
        """Returns the hyperparameters of each weight under `scaling`."""
        return None if self.scaling is None else self.scaling.scaled(self.model)

    def _new_model(self, *, key: PRNGKeyArray) -> Any:
        made = self.model(key=key)
        return made if self.scaled is None else self.scaled.begun(made)

    def _made_optimizer(self) -> Optimizer:
        given: dict[str, Any] = {} if self.scaled is None else {"scaled": self.scaled}
        made = self.optimizer(self.steps, **given)
        groups = self.trainable or {}
        if any(group.decays is not None for group in groups.values()):
            given["decays"] = decays_by(groups, self.recipe.shapes, made.decays)
            made = self.optimizer(self.steps, **given)
        made = with_rates(made, self.recipe.shapes, self.trainable)
        return made if self.average is None else self.average.added_to(made, self.steps)

    @property
    def validation_sets(self) -> dict[str, Source]:
        """Returns the validation sources by name; a single one is called "validation"."""
        if isinstance(self.validation, Mapping):
            return dict(self.validation)
        return {} if self.validation is None else {"validation": self.validation}

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """Returns the names of the metrics that each evaluation adds to its step."""
        named = isinstance(self.validation, Mapping)
        suite = self.evaluation.suite
        names = () if suite is None else suite.metrics(self.suite_length, self.text_codec)
        sets = self.validation_sets
        return (*validation_metrics(self.objective, sets, named, "evaluation"), *names)

    @property
    def step_tokens(self) -> int:
        """Returns the tokens of a batch of `data`, padding included."""
        return self.data.batch_size * self.data.sequence_length

    @property
    def suite_length(self) -> int:
        """Returns the sequence length of the suite, which is made for the first stage."""
        assert self.evaluation.suite is not None
        return self.evaluation.suite.length(self.data.sequence_length)

    @functools.cached_property
    def text_codec(self) -> TextCodec | None:
        """Returns the codec between texts and the ids of `data`; `None` if no tokenizer is known.

        Raises ValueError or OSError if it cannot be loaded.
        """
        return self.data.text_codec() if isinstance(self.data, HasText) else None

    def flops_per_token(self, causal: bool) -> float:
        """Returns FLOPs of a step per token of `data`, also of the objective's reference model.

        See `lmlib.optim.trainable.flops_per_token`.
        """
        length, model = self.data.sequence_length, self.recipe.shapes
        of_training = flops_per_token(model, self.trainable, length, causal)
        flops = of_training + self.objective.flops_per_token(model, length, causal)
        if self.microbatches > 1:
            flops += self.objective.flops_of_whole_batch(model, length, causal)
        return flops

    def abstract_state(self) -> State:
        """Returns shapes, dtypes and `NamedSharding`s of the state."""
        state = abstract_state(lambda: self.recipe.abstract_model, self.training)
        recipe = self.reference_recipe
        if recipe is None:
            return state
        return state.with_reference_model(abstract_model(lambda: recipe.abstract_model, self.mesh))

    def abstract_batch(self) -> Batch:
        """Returns shapes, dtypes and `NamedSharding`s of a batch."""
        data = self.data
        sizes = data.batch_size, data.sequence_length
        whole, labelled = has_whole_rows(data), bool(is_labelled(data))
        return abstract_batch(*sizes, self.mesh, teacher_k(data), whole, labelled)

    def initial_state(self, model: Any = None, reference_model: Any = None) -> State:
        """Returns the state before the first step.

        Args:
          model: initial weights, stored as `recipe` stores them; its buffers are donated. `None`
            for new weights.
          reference_model: the frozen model that the objective needs, stored as by
            `reference_recipe`; `None` for a new one, unless the objective names its weights.

        Raises:
          ValueError: if the objective names the reference model's weights, but no model is given.
        """
        if model is None:
            model = self.recipe.new_model(self.mesh)
        state = initial_state(model, self.training)
        if reference_model is None:
            reference_model = self._new_reference_model()
        return state.with_reference_model(reference_model)

    def _new_reference_model(self) -> Any:
        recipe, wanted = self.reference_recipe, self.objective.reference_model
        if recipe is None or wanted is None:
            return None
        if wanted.weights_from is not None:
            raise ValueError(
                f"the objective compares with the weights of {wanted.weights_from}: give them as "
                "reference_model"
            )
        return recipe.new_model(self.mesh)

    def trace_step(self) -> jax.stages.Traced:
        """Traces the train step in the way every command does.

        The step is called as `state, metrics = step(state, batch, training.hyperparameters)`.
        """
        return trace_step(self.abstract_state(), self.abstract_batch(), self.training)

    def check(self) -> None:
        """Checks that the parts fit each other, before anything compiles."""
        check_experiment(self)

    def check_memory(self) -> None:
        """Raises MemoryError if the state and a batch of any stage exceed the devices' free memory.

        A step needs more than that; see `python -m runner.plan`.
        """
        state, devices = self.abstract_state(), [*self.mesh.devices.flat]
        kept = (state.model, state.optimizer, state.frozen, state.reference_model)
        for stage in self.stages.values():
            check_fits("what is trained and a batch", (*kept, stage.abstract_batch()), devices)
