"""The objects that a run is made of."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from lmlib import train
from lmlib.adapters import without_adapters
from lmlib.compute import Compute
from lmlib.data.batch import Batch, Source
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.metadata import tokenizers_differ
from lmlib.data.mixture import Mixture
from lmlib.data.text import HasText, TextCodec
from lmlib.evaluate.suite.suite import Suite
from lmlib.guard import Guard
from lmlib.losses import NextToken, Objective
from lmlib.models.adapted import has_adapters
from lmlib.models.protocol import check_protocol
from lmlib.models.weights import fold
from lmlib.optim import Optimizer
from lmlib.parallel.check import check_batch, check_model
from lmlib.train import State
from lmlib.trainable import (
    Groups,
    decays_by,
    flops_per_token,
    grouped,
    resting,
    with_groups,
)

_KINDS = {
    "compute": Compute,
    "objective": Objective,
    "data": Source,
    "mesh": Mesh,
    "guard": Guard,
    "suite": Suite | None,
}
_FROZEN_DTYPES = ("float32", "bfloat16", "float16", "int8")
_LEAST = {
    "steps": 1,
    "microbatches": 1,
    "stop_after_skipped": 1,
    "validation_batches": 1,
    "evaluate_every": 1,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "keep_checkpoints_every": 1,
    "keep_best_checkpoints": 0,
    "tolerated_failed_saves": 0,
    "captures": 0,
    "prefetch_batches": 1,
    "sample_every": 1,
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What to train, on what, how and where.

    Args:
      model: `model(key=…)` makes the model, a `lmlib.models.protocol.Model`. What it is given says
        what the model is: a run cannot go on with another one.
      data: training batches.
      optimizer: `optimizer(steps)` makes the optimizer.
      mesh: the devices.
      steps: updates to make.
      compute: how the model is computed.
      objective: what is minimised.
      trainable: the weights that train, in groups by their names; others are frozen: they have no
        gradient, no moments and no copy in float32. `None`: all train.
      frozen_dtype: of frozen weights; "int8" keeps matrices in 8 bits. `None`: that of `compute`.
      microbatches: parts of a batch whose gradients are added before one update.
      guard: which updates are skipped.
      stop_after_skipped: a run stops when so many updates in a row were skipped.
      seed: of the initial weights.
      init_from: whose weights the run begins with: another run's, `RUN` or `RUN@STEP`, or those in
        a folder of Hugging Face's, which may be a name on the Hub; `None`: new ones. Only a run
        that has no checkpoint yet reads them.
      validation: batches to evaluate on, in a fixed order: a source, or several by their names;
        `None` for none.
      validation_weights: of each named one in the total of all; `None`: the targets counted.
      validation_batches: how many of them each evaluation sees; `None` for all. After the last
        step a finite source is seen whole.
      suite: what each evaluation measures besides `validation`, at the cost of 10,000 to 40,000
        tokens; `None` for nothing.
      evaluate_every, checkpoint_every: in steps.
      keep_checkpoints: how many checkpoints stay, the newest.
      keep_checkpoints_every: besides, those of every so many steps; `None` for none.
      keep_best_checkpoints: besides, how many of the best.
      best_by: the metric that ranks checkpoints, of `evaluation_metrics`.
      best_is_highest: whether more of it is better.
      tolerated_failed_saves: how many saves in a row may fail, the disk being full say, before the
        run stops.
      captures: how many skipped updates are kept for `python -m runner.replay`; each holds a
        checkpoint back.
      prefetch_batches: how many batches are read and placed on the devices ahead of their step.
      prompts: texts that the model continues at the end of the run.
      sample_every: besides, every so many steps; `None`: not.
    """

    model: Callable[..., Any]
    data: Source
    optimizer: Callable[[int], Optimizer]
    mesh: Mesh
    steps: int
    compute: Compute = Compute()
    objective: Objective = NextToken()
    trainable: Groups | None = None
    frozen_dtype: str | None = None
    microbatches: int = 1
    guard: Guard = Guard()
    stop_after_skipped: int = 10
    seed: int = 0
    init_from: str | None = None
    validation: Source | Mapping[str, Source] | None = None
    validation_weights: Mapping[str, float] | None = None
    validation_batches: int | None = None
    suite: Suite | None = None
    evaluate_every: int = 1_000
    checkpoint_every: int = 1_000
    keep_checkpoints: int = 3
    keep_checkpoints_every: int | None = None
    keep_best_checkpoints: int = 0
    best_by: str = "validation_loss"
    best_is_highest: bool = False
    tolerated_failed_saves: int = 2
    captures: int = 3
    prefetch_batches: int = 2
    prompts: tuple[str, ...] = ()
    sample_every: int | None = None

    @property
    def make_model(self) -> Callable[[], Any]:
        """Makes the model with new weights, each in the dtype that it is kept in."""
        make = functools.partial(self.model, key=jax.random.key(self.seed))
        trained, dtype = self.trained, self.frozen_dtype or self.compute.dtype
        return make if trained is None else lambda: resting(make(), trained, dtype)

    @functools.cached_property
    def trained(self) -> frozenset[str] | None:
        """The paths of the weights that train; `None`: all do."""
        if self.trainable is None:
            return None
        return frozenset(grouped(self._new_model, self.trainable))

    @functools.cached_property
    def _new_model(self) -> Any:
        """Shapes of the model as `model` makes it."""
        return jax.eval_shape(functools.partial(self.model, key=jax.random.key(self.seed)))

    @property
    def make_companion(self) -> Callable[[], Any] | None:
        """Makes the frozen model that the objective needs, with new weights, in the dtype of
        `compute`; `None`: it needs none."""
        wanted = self.objective.companion
        if wanted is None:
            return None
        key = fold(jax.random.key(self.seed), "companion")
        make = functools.partial(wanted.model or self.model, key=key)
        return lambda: resting(without_adapters(make()), frozenset(), self.compute.dtype)

    @functools.cached_property
    def made_optimizer(self) -> Optimizer:
        made = self.optimizer(self.steps)
        if self.trainable is None:
            return made
        if any(group.decays is not None for group in self.trainable.values()):
            decays = decays_by(self.trainable, self._new_model, made.decays)
            made = self.optimizer(self.steps, decays=decays)  # type: ignore[call-arg]
        return with_groups(made, self._new_model, self.trainable)

    @property
    def validation_sets(self) -> dict[str, Source]:
        """What is evaluated on, by name; a single source is called "validation"."""
        if isinstance(self.validation, Mapping):
            return dict(self.validation)
        return {} if self.validation is None else {"validation": self.validation}

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """The names of what each evaluation adds to the metrics of its step."""
        sets = self.validation_sets
        in_text = {name for name, each in sets.items() if each.bytes_per_target is not None}
        several = sets if isinstance(self.validation, Mapping) else ()
        return (
            *(("validation_loss",) if sets else ()),
            *(f"validation_loss/{name}" for name in several),
            *(("validation_bits_per_byte",) if sets and len(in_text) == len(sets) else ()),
            *(f"validation_bits_per_byte/{name}" for name in several if name in in_text),
            *(self.suite.metrics(self.suite_length, self.text_codec) if self.suite else ()),
        )

    @property
    def suite_length(self) -> int:
        """Tokens of a sequence of the suite."""
        return (self.suite or Suite()).length(self.data.sequence_length)

    @functools.cached_property
    def text_codec(self) -> TextCodec | None:
        """Between texts and the ids of `data`; `None` if no tokenizer is known.

        Raises ValueError or OSError if it cannot be loaded.
        """
        return self.data.text_codec() if isinstance(self.data, HasText) else None

    def flops_per_token(self, causal: bool) -> float:
        """Of a step on sequences of `data`, with those of the objective's second model; see
        `lmlib.trainable.flops_per_token`."""
        length, model = self.data.sequence_length, self._new_model
        of_training = flops_per_token(model, self.trainable, length, causal)
        return of_training + self.objective.flops_per_token(model, length, causal)

    def abstract_model(self) -> Any:
        """The model with `ShapeDtypeStruct`s for weights."""
        return jax.eval_shape(self.make_model)

    def abstract_state(self) -> State:
        """Shapes, dtypes and `NamedSharding`s of the state."""
        state = train.abstract_state(
            self.make_model, self.made_optimizer, self.mesh, self.guard, self.trained
        )
        return train.with_companion(state, self.abstract_companion())

    def abstract_companion(self) -> Any:
        """Shapes, dtypes and `NamedSharding`s of the frozen model that the objective needs, which
        is kept in the compute dtype; `None`: it needs none."""
        make = self.make_companion
        return None if make is None else train.abstract_model(make, self.mesh)

    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and `NamedSharding`s of a batch."""
        data = self.data
        return train.abstract_batch(data.batch_size, data.sequence_length, self.mesh)

    def init(self, companion: Any = None) -> State:
        """The state before the first step, with new weights; `companion`: as of `begin`."""
        return self.begin(train.new_model(self.make_model, self.mesh), companion)

    def begin(self, model: Any, companion: Any = None) -> State:
        """The state before the first step, with the weights of `model`, whose buffers it takes.

        Args:
          companion: the frozen model that the objective needs, as `abstract_companion` says;
            `None`: new, if the objective takes it from nowhere.

        Raises:
          ValueError: if the objective names the companion's weights, and there is none.
        """
        state = train.begin(
            model, self.made_optimizer, self.mesh, self.guard, self.seed, self.trained
        )
        if companion is None:
            companion = self._new_companion()
        return train.with_companion(state, companion)

    def _new_companion(self) -> Any:
        make, wanted = self.make_companion, self.objective.companion
        if make is None or wanted is None:
            return None
        if wanted.weights_from is not None:
            raise ValueError(
                f"the objective compares with the weights of {wanted.weights_from}: give them as "
                "companion"
            )
        return train.new_model(make, self.mesh)

    def trace_step(self) -> jax.stages.Traced:
        """The train step, as every command traces it: `state, metrics = step(state, batch)`."""
        return train.trace_step(
            self.abstract_state(),
            self.abstract_batch(),
            self.made_optimizer,
            self.mesh,
            self.compute,
            self.objective,
            self.guard,
            self.microbatches,
        )

    def compile_step(self) -> jax.stages.Compiled:
        """`trace_step`, compiled for the devices of the mesh."""
        with jax.set_mesh(self.mesh):
            return self.trace_step().lower().compile()

    def check(self) -> None:
        """Checks that the parts fit each other, before anything compiles.

        Raises:
          ValueError: naming the setting, its value, and what would work.
        """
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                expected = getattr(kind, "__name__", kind)
                raise ValueError(f"{name} must be of type {expected}, got {value!r}")
        validation = self.validation
        sets = validation.values() if isinstance(validation, Mapping) else (validation,)
        if validation is not None and not all(isinstance(each, Source) for each in sets):
            raise ValueError(
                f"validation must be of type {Source | None}, or a mapping of names to such, got "
                f"{validation!r}"
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.sample_every is not None and not self.prompts:
            raise ValueError(
                f"sample_every is {self.sample_every}, but there are no prompts to continue: set "
                "prompts, or sample_every to None"
            )
        self._check_trainable()
        model = self.abstract_model()
        check_protocol(model)
        check_model(model, self.mesh)
        self._check_objective(model)
        self._check_source("data", self.data, model, self.microbatches)
        if self.data.batches is not None and self.data.batches < self.steps:
            raise ValueError(
                f"data ends after {self.data.batches} batches, but steps is {self.steps}: make "
                "fewer steps, or let the data repeat (epochs=None)"
            )
        if self.suite is not None:
            self._check_suite(model)
        if self.validation is not None:
            self._check_validation(model)

    def _check_trainable(self) -> None:
        if self.frozen_dtype not in (None, *_FROZEN_DTYPES):
            raise ValueError(
                f"frozen_dtype must be one of {', '.join(_FROZEN_DTYPES)}, or None, got "
                f"{self.frozen_dtype!r}"
            )
        if self.trainable is None and self.frozen_dtype is not None:
            raise ValueError(
                f"frozen_dtype is {self.frozen_dtype!r}, but nothing is frozen: set trainable"
            )
        if self.trainable is None and has_adapters(self._new_model):
            raise ValueError(
                "the model has adapters, whose bases do not train, but trainable is None: "
                "lmlib.trainable.adapters() trains the adapters alone"
            )
        self.optimizer(self.steps)
        try:
            _ = self.made_optimizer
        except TypeError as error:
            raise ValueError(
                "a group of trainable says which weights decay, but the optimizer takes no "
                f"`decays`: {error}"
            ) from None

    def _check_objective(self, model: Any) -> None:
        make = self.make_companion
        companion = None if make is None else jax.eval_shape(make)
        if companion is not None:
            check_protocol(companion)
            check_model(companion, self.mesh)
            companion.check(self.data.sequence_length, self.compute)
        self.objective.check(model, companion, self.trained)

    def _check_suite(self, model: Any) -> None:
        if self.validation is None:
            raise ValueError("suite is measured where validation is: set validation too")
        length, compute = self.suite_length, self.compute
        model.check(length, compute)
        check_batch(self.data.batch_size, length, 1, compute.sequence_parallel, self.mesh)

    def _check_validation(self, model: Any) -> None:
        named = isinstance(self.validation, Mapping)
        sets = self.validation_sets
        if not sets:
            raise ValueError("validation names no source: give it one, or None for none")
        for name, source in sets.items():
            if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
                raise ValueError(
                    f"validation has the name {name!r}: a name is of letters, digits, _, . and -"
                )
            where = f"validation[{name!r}]" if named else "validation"
            self._check_source(where, source, model, 1)
            if tokenizers_differ(self.data.tokenizer, source.tokenizer):
                raise ValueError(
                    f"data was made by {self.data.tokenizer}, but {where} by {source.tokenizer}: "
                    "their ids mean different texts; make both with one tokenizer"
                )
            if self.validation_batches is None and source.batches is None:
                raise ValueError(
                    f"{where} never ends: set validation_batches to the number of batches that "
                    "each evaluation should see"
                )
        weights = self.validation_weights
        if weights is not None:
            if not named or weights.keys() != sets.keys():
                raise ValueError(
                    f"validation_weights are of {', '.join(map(repr, weights))}, but validation "
                    f"has {', '.join(map(repr, sets)) if named else 'no names'}: name each once"
                )
            if not all(weight >= 0 for weight in weights.values()) or not sum(weights.values()) > 0:
                raise ValueError(f"validation_weights must be positive numbers, got {weights!r}")
        if self.best_by not in self.evaluation_metrics:
            raise ValueError(
                f"best_by={self.best_by!r} is no metric of this experiment's evaluations; there "
                f"are {', '.join(self.evaluation_metrics)}"
            )

    def _check_source(self, name: str, source: Source, model: Any, microbatches: int) -> None:
        if source.max_token_id >= model.vocab:
            raise ValueError(
                f"{name} has token ids up to {source.max_token_id}, but the model's vocabulary ends"
                f" at {model.vocab - 1}; set vocab to {source.max_token_id + 1} or more, or use the"
                " data set's own tokenizer"
            )
        _check_length(name, source)
        model.check(source.sequence_length, self.compute)
        check_batch(
            source.batch_size,
            source.sequence_length,
            microbatches,
            self.compute.sequence_parallel,
            self.mesh,
        )


def _check_length(name: str, source: Source) -> None:
    """Refuses sequences that are longer than all the data, before anything of that size is made."""
    if isinstance(source, Mixture):
        for part in source.sources.values():
            _check_length(name, part)
    elif isinstance(source, FlatTokens) and source.sequence_length >= source.tokens:
        raise ValueError(
            f"{name} makes sequences of {source.sequence_length:,} tokens and has "
            f"{source.tokens:,} tokens in all: set sequence_length to {source.tokens - 1:,} or less"
        )
