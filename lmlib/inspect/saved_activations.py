"""The tensors saved by the forward pass for the backward pass, by name."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from lmlib.experiment import Experiment
from lmlib.losses.next_token import batch_loss
from lmlib.state import abstract_batch, abstract_model
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns

# Inputs of the rematerialised parts of the model, and the loss's residuals: always saved,
# independent of `saved`.
ALWAYS_KEPT = ("layer_input", "head_input", "loss_gradient")


@dataclasses.dataclass(frozen=True)
class SavedActivation:
    """One saved tensor of one microbatch; `shape` is global, with stacked layers leading."""

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    bytes_per_device: int


class SavedActivations(tuple[SavedActivation, ...]):
    """A tuple that prints as a table."""

    @property
    def bytes_per_device(self) -> int:
        return sum(activation.bytes_per_device for activation in self)

    @property
    def together(self) -> "SavedActivations":
        """Returns one for all that are equal, as in layers of an unrolled loop, which lead."""
        return SavedActivations(
            dataclasses.replace(
                each,
                shape=(count, *each.shape) if count > 1 else each.shape,
                bytes_per_device=count * each.bytes_per_device,
            )
            for each, count in Counter(self).items()
        )

    def __str__(self) -> str:
        rows = [("activation", "shape", "dtype", "per device")]
        rows += [
            (a.name, " × ".join(map(str, a.shape)), a.dtype.name, bytes_text(a.bytes_per_device))
            for a in self.together
        ]
        rows.append(("total", "", "", bytes_text(self.bytes_per_device)))
        return columns(rows)


def saved_activations(experiment: Experiment) -> SavedActivations:
    """Returns the tensors that one microbatch of `experiment` saves, from its traced forward pass.

    The backward pass also needs the weights and a few numbers per position; these are not listed.
    """
    data, mesh = experiment.data, experiment.mesh
    model = abstract_model(lambda: experiment.recipe.abstract_model, mesh)
    rows = data.batch_size // experiment.microbatches
    batch = abstract_batch(rows, data.sequence_length, mesh)
    objective, compute = experiment.objective, experiment.compute

    def loss(model: Any, batch: Any) -> Any:
        if objective.trains_predictors:
            return objective.sums(model, None, batch, compute)
        return batch_loss(model, batch, compute)

    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(loss)(model, batch)
    kept = {*ALWAYS_KEPT, *experiment.compute.kept(model.names.saved)}
    return SavedActivations(
        SavedActivation(
            name=name,
            shape=(*stacked, *value.shape),
            dtype=value.dtype,
            bytes_per_device=math.prod(stacked)
            * math.prod(NamedSharding(mesh, value.sharding.spec).shard_shape(value.shape))
            * value.dtype.itemsize,
        )
        for name, value, stacked in _named_values(traced.jaxpr, ())
        if name in kept
    )


def _named_values(
    jaxpr: Any, stacked: tuple[int, ...]
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yields every `checkpoint_name`: its name, its type, and the lengths of enclosing scans."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"], equation.outvars[0].aval, stacked
        around = stacked
        if equation.primitive.name == "scan":
            around = (*stacked, equation.params["length"])
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _named_values(inner, around)
