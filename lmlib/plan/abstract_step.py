"""A run's train step before it is compiled: shapes, dtypes and layouts, and no arrays."""

import dataclasses

import jax

from lmlib import train
from lmlib.data.batch import Batch
from lmlib.experiment import Experiment
from lmlib.guard import Guard
from lmlib.optim import Optimizer


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """What `lmlib.train.compile_step` compiles. `state` and `batch` are abstract."""

    experiment: Experiment
    optimizer: Optimizer
    state: train.State
    batch: Batch


def abstract_step(experiment: Experiment) -> AbstractStep:
    """The step that a run of `experiment` makes, on the devices of its mesh."""
    optimizer = experiment.optimizer(experiment.steps)
    mesh, data = experiment.mesh, experiment.data
    guard = experiment.guard or Guard()
    state = train.abstract_state(experiment.make_model, optimizer, mesh, guard)
    batch = train.abstract_batch(data.batch_size, data.sequence_length, mesh)
    return AbstractStep(experiment, optimizer, state, batch)


def traced(step: AbstractStep) -> jax.stages.Traced:
    """The step as the run traces it."""
    experiment = step.experiment
    return train.trace_step(
        step.state,
        step.batch,
        step.optimizer,
        experiment.mesh,
        experiment.microbatches,
        experiment.z_loss,
        experiment.guard or Guard(),
    )
