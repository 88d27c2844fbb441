"""lmlib's training step as the runner makes it."""

import jax
import optax

from lmlib import train
from lmlib.optim.adamw import adamw
from lmlib.optim.matrices.muon import muon
from lmlib.optim.optimizer import Optimizer
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.state import Training, abstract_batch, new_state
from step_peers.work import Work


def _constant(peak_lr: float, steps: int) -> optax.Schedule:
    return optax.constant_schedule(peak_lr)


def make_optimizer(work: Work) -> Optimizer:
    settings = work.size.adamw
    if work.muon:
        return muon(work.steps, settings.learning_rate, _constant)
    return adamw(
        work.steps,
        settings.learning_rate,
        schedule=_constant,
        b1=settings.b1,
        b2=settings.b2,
        epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
    )


class LmlibStep:
    """lmlib's step as a `step_peers.work.Contender`. It initialises `work.weights` itself."""

    def __init__(self, work: Work):
        mesh, size = make_mesh(), work.size
        training = Training(make_optimizer(work), mesh, size.compute(work.precision))
        self._state = new_state(size.make_model, training)
        whole_rows = not work.packed
        batch = abstract_batch(size.batch, size.sequence, mesh, whole_rows=whole_rows)
        traced = train.trace_step(self._state, batch, training)
        self._step = traced.lower().compile()
        self._hyperparameters = training.hyperparameters
        self._batches = jax.device_put(work.batches, sharding("batch seq", mesh))

    def run(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self._state, metrics = self._step(
                self._state, self._batches[step], self._hyperparameters
            )
            losses.append(metrics["loss"])
        jax.block_until_ready(self._state)
        return [float(loss) for loss in losses]

    def planned_bytes(self) -> int | None:
        return planned_peak(self._step)

    def peak_bytes(self) -> int | None:
        return used_peak()


def planned_peak(step: jax.stages.Compiled) -> int | None:
    """Returns the peak memory planned by the compiler, in bytes; `None` on CPUs."""
    if jax.default_backend() == "cpu":
        return None
    analysis = step.memory_analysis()
    return getattr(analysis, "peak_memory_in_bytes", None) or None


def used_peak() -> int | None:
    """Returns the most bytes of the device that JAX has used; `None` on CPUs."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
