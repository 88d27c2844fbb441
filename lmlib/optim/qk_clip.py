"""QK-clip: after an update, scales queries and keys of heads whose attention logits grow too large.

Shapes: R layers of a pattern, E embed, H heads, K kv_heads, D head_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lmlib.models.measured_block import MeasuredBlock
from lmlib.optim.optimizer import Decays, Optimizer


def qk_clip(
    steps: int,
    optimizer: Callable[..., Optimizer],
    threshold: float = 100.0,
    scaled: Any = None,
    decays: Decays | None = None,
) -> Optimizer:
    """QK-clip around an optimizer; around Muon it is MuonClip (Kimi Team 2025, arXiv:2507.20534).

    A head whose largest logit in the batch was S > threshold, before the update, gets logits
    threshold / S times as large (§2.1, algorithm 1). Half of that, as a root, is a factor of its
    query weights, and half of its key weights. Keys that several heads share stay as they are, like
    the paper's shared rotary keys; then queries get the whole factor. Moments do not change.

    The model must be made with `layer=lmlib.models.measured_block.measured_block`. A group's
    learning rate also multiplies what the clipping changes.

    Args:
      steps: length of the schedule; set by the run.
      optimizer: makes the optimizer, as in `Experiment.optimizer`.
      threshold: the largest logit that is left alone, after the scale, before softmax.
      scaled, decays: arguments of `optimizer`, if the experiment sets them.

    Raises:
      ValueError: if threshold is not positive; later, if the model measures no logits, or its
        queries or keys do not train as whole matrices.
    """
    if not 0 < threshold < math.inf:
        raise ValueError(f"threshold must be a positive number, got {threshold}")
    given = {"scaled": scaled, "decays": decays}
    made = optimizer(steps, **{name: x for name, x in given.items() if x is not None})
    inner = optax.with_extra_args_support(made.transformation)

    def init(model: Any) -> optax.OptState:
        _check(model)
        return inner.init(model)

    def update(
        gradients: Any, state: Any, model: Any = None, *, tallies: Any = None, **given: Any
    ) -> tuple[Any, optax.OptState]:
        updates, state = inner.update(gradients, state, model, **given)
        patterns = [
            tuple(map(_clipped, *each, [threshold] * len(each[0])))
            for each in zip(updates.stack.patterns, model.stack.patterns, tallies, strict=True)
        ]
        return eqx.tree_at(lambda model: model.stack.patterns, updates, tuple(patterns)), state

    return made._replace(
        transformation=optax.GradientTransformationExtraArgs(init, update),
        learning_rate=lambda step, tallies=None, **given: made.learning_rate(step, **given),
        # The step replaces this by the batch's tallies.
        hyperparameters={**made.hyperparameters, "tallies": None},
    )


def _check(model: Any) -> None:
    layers = [layer for pattern in model.stack.patterns for layer in pattern]
    measured = [layer.attention for layer in layers if isinstance(layer, MeasuredBlock)]
    if not measured or hasattr(model, "predictors"):
        raise ValueError(
            "qk_clip needs the attention logits of the layers, and multi-token prediction has "
            "others: make the model with layer=lmlib.models.measured_block.measured_block"
        )
    for attention in measured:
        if not all(eqx.is_array_like(each) for each in (attention.query, attention.key)):
            raise ValueError(
                "qk_clip scales the weights of queries and keys, and here they are frozen or have "
                "adapters: leave out qk_clip"
            )


def _clipped(updates: Any, layer: Any, tallies: Any, threshold: float) -> Any:
    """The updates of layers, after which their queries and keys are clipped."""
    if not isinstance(layer, MeasuredBlock):
        return updates
    largest_RH: Float[Array, "r heads"] = tallies[1].value
    factor_RH = threshold / jnp.maximum(largest_RH, threshold)
    alone = layer.attention.query.shape[2] == layer.attention.key.shape[2]
    factors = {"query": jnp.sqrt(factor_RH) if alone else factor_RH}
    if alone:
        factors["key"] = factors["query"]

    def clipped(name: str, update: Array, weight: Array) -> Array:
        heads = 1 if name.endswith("_bias") else 2  # the axis
        factor_RH = factors[name.removesuffix("_bias")]
        if not jax.sharding.get_abstract_mesh().empty:
            places = [*jax.typeof(weight).sharding.spec, None, None, None]
            factor_RH = jax.sharding.reshard(factor_RH, PartitionSpec(places[0], places[heads]))
        others = [i for i in range(1, weight.ndim) if i != heads]
        return (weight + update) * jnp.expand_dims(factor_RH, others) - weight

    names = [name for each in factors for name in (each, f"{each}_bias")]
    names = [name for name in names if getattr(layer.attention, name) is not None]
    new = [
        clipped(name, getattr(updates.attention, name), getattr(layer.attention, name))
        for name in names
    ]
    return eqx.tree_at(lambda u: [getattr(u.attention, name) for name in names], updates, new)
