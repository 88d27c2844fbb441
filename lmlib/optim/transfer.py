"""Transfers learning rates and initial values from a small model to wider and deeper ones.

The best settings of the small model, the base, are then close to the best ones of the others: µP
for width (Yang et al. 2022, arXiv:2203.03466) and CompleteP for depth (Dey et al. 2025,
arXiv:2505.01618, table 1, with α = 1). Both derive initial values, learning rates, Adam's epsilon
and some multipliers from sizes. Here a multiplier is part of its weight: c · W with W's values and
rate is the weight c W with both multiplied by c. The model itself does not change, and is saved,
exported and sampled as usual.

Consider a weight with `inputs` times as many inputs as in the base (over the axes that products sum
over), and with `outputs` times as many outputs, in a stack `depth` times as deep. It has

    narrowing n   1 if inputs = 1, else min(1, outputs / inputs): 1 if both sides grow equally,
                  1 / inputs if the outputs have a fixed size, as for the unembedding
    writing w     1 / depth if it writes to the residual stream, in a layer; else 1

                      initial values       Adam's rate      Muon's rate
    matrices          w √(n / inputs)      w / inputs       w √(outputs / inputs) / √largest
    tables, vectors   w                    w                same as Adam's

All are factors of the base's values; `largest` is the growth of the matrix's larger side. Both
rates follow from one condition: the change of an output by an update must have the same size in
every model, so updates must have spectral norms proportional to √(outputs / inputs) (Yang, Simon &
Bernstein 2023, arXiv:2310.17813, condition 1). Adam's updates have elements of a given size and low
rank, so their norms are proportional to √(inputs · outputs); Muon's are orthogonal matrices times
√largest.

The last norm of a tied model has the factor 1 / width, for initial values and rate, in place of the
unembedding. Weight decay is not multiplied by these factors: a step removes the same fraction of a
weight in every model. Epsilon has the factor 1 / width, in layers 1 / (width · depth), the same as
gradients. Clipping and epsilon apply to gradients with respect to W.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array

from lmlib.models.matrices.lora import has_adapters
from lmlib.models.model import check_is_model
from lmlib.models.weights import Constant, Random
from lmlib.optim.optimizer import by_weight
from lmlib.parallel.axes import Weight, map_weights

RESIDUAL = "embed"  # the axis of the residual stream, as `lmlib.models.model.Model` names it
_OF_HEADS = "head_dim", "key_dim"  # axes of scores, and of reads of a recurrent state


class Factors(NamedTuple):
    """The factors of one weight."""

    initial: float  # of its family's initial values
    multiplier: float  # c, if the paper has c · W in place of the weight
    epsilon: float  # of Adam's epsilon, for the gradient with respect to W
    rate: float  # of Adam's learning rate, for the weight itself
    writing: float  # of its contribution to the residual stream, included in `rate`


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A model's weights compared with the base's, by their paths."""

    sizes: Mapping[str, Mapping[str, int]]  # of each weight's axes in the model
    base: Mapping[str, Mapping[str, int]]  # and in the base
    factors: Mapping[str, Factors]

    def begun(self, model: Any) -> Any:
        """Scales the initial values of `model`, as its family makes it."""

        def scaled(weight: Weight, array: Array) -> Array:
            factor = self.factors[weight.path].initial
            return array if factor == 1 else array * factor

        return map_weights(scaled, model)

    def before_clipping(self) -> optax.GradientTransformation:
        """Converts gradients with respect to weights to gradients with respect to W."""
        return by_weight(lambda weight: self.factors[weight.path].multiplier)

    def of_adam(self, adam: optax.GradientTransformation) -> optax.GradientTransformation:
        """`adam` with the epsilon and the learning rate of each weight."""
        factors = self.factors
        # Scaling gradients is equivalent to scaling epsilon, for Adam.
        return optax.chain(
            by_weight(lambda weight: 1 / factors[weight.path].epsilon),
            adam,
            by_weight(lambda weight: factors[weight.path].rate),
        )

    def of_orthogonal(self, weight: Weight, apart: Collection[str] = ()) -> float:
        """The factor of the learning rate for orthogonal updates times √(the larger side).

        Each index along the axes `apart` is a separate matrix.
        """
        axes = [axis for axis in weight.own_axes if axis not in apart]
        summed = weight.declaration.summed

        def root_of_ratio(sizes: Mapping[str, int]) -> float:
            inputs = math.prod(sizes[axis] for axis in axes if axis in summed)
            outputs = math.prod(sizes[axis] for axis in axes if axis not in summed)
            return math.sqrt(outputs / inputs / max(inputs, outputs))

        path = weight.path
        grown = root_of_ratio(self.sizes[path]) / root_of_ratio(self.base[path])
        return self.factors[path].writing * grown


@dataclasses.dataclass(frozen=True)
class CompleteP:
    """Transfers the rates and initial values of a base model, for `Experiment.scaling`.

    Args:
      base: sizes of the base, where they differ from the model's arguments: {"embed": 64, "heads":
        1, "mlp": 192, "layers": 2}.

    Raises:
      ValueError: if `base` is empty, or a size is not positive.
    """

    base: Mapping[str, int]

    def __post_init__(self) -> None:
        if not isinstance(self.base, Mapping) or not self.base:
            raise ValueError(
                f"scaling.base must name sizes, like {{'embed': 64, 'layers': 2}}, got {self.base}"
            )
        for name, size in self.base.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"scaling.base[{name!r}] must be at least 1, got {size!r}")

    def scaled(self, make: Callable[..., Any]) -> Scaled:
        """Compares the model that `make(key=…)` makes with its base, without making arrays.

        Raises:
          ValueError: if the model has adapters, `make` does not take the sizes, or model and base
            differ in more than sizes. Also in cases that the rule does not cover: growing heads,
            norms after the outputs of layers, a tied model without a last norm.
        """
        model = _shapes(make)
        check_is_model(model)
        if has_adapters(model):
            raise ValueError(
                "scaling is for models that train from their first values on, and this one has "
                "adapters: leave out scaling, or the adapters"
            )
        if hasattr(model, "predictors"):
            raise ValueError(
                "scaling has no rule for heads of multi-token prediction: leave out one"
            )
        try:
            base = _shapes(functools.partial(make, **self.base))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"no model can be made with scaling.base = {dict(self.base)}: {error}"
            ) from None
        return _scaled(_Known.of(model), _Known.of(base))


def _shapes(make: Callable[..., Any]) -> Any:
    return jax.eval_shape(lambda: make(key=jax.random.key(0)))


class _Known(NamedTuple):
    """The properties of a model that the rule needs."""

    weights: Mapping[str, Weight]  # by path
    sizes: Mapping[str, Mapping[str, int]]  # by path, the sizes of axes by name
    layers: int
    last: frozenset[str]  # paths of the weights after the layers, if tied; not the unembedding
    normed: bool  # True if a layer norms its outputs
    tied: bool

    @classmethod
    def of(cls, model: Any) -> "_Known":
        weights, sizes = dict[str, Weight](), dict[str, Mapping[str, int]]()
        path_of = dict[int, str]()

        def know(weight: Weight, array: Any) -> None:
            weights[weight.path], path_of[id(array)] = weight, weight.path
            sizes[weight.path] = dict(zip(weight.axes, array.shape, strict=True))

        map_weights(know, model)
        parts = model.weight_groups()
        in_layers = [number for number, part in enumerate(parts) if part.layers is not None]
        tied = not any(
            "vocab" in weight.axes and weight.declaration.summed for weight in weights.values()
        )
        after = parts[in_layers[-1] + 1 :] if tied and in_layers else ()
        last = {path_of.get(id(leaf)) for part in after for leaf in jax.tree.leaves(part.weights)}
        layers = sum(len(parts[number].layers or ()) for number in in_layers)
        names = "attention_after_norm", "mlp_after_norm"
        normed = any(
            getattr(parts[number].weights, name, None) is not None
            for number in in_layers
            for name in names
        )
        return cls(weights, sizes, layers, frozenset(filter(None, last)), normed, tied)

    def width(self) -> int:
        """The width of the residual stream."""
        return next((sizes[RESIDUAL] for sizes in self.sizes.values() if RESIDUAL in sizes), 1)

    def first_size(self, path: str) -> float | None:
        """The standard deviation of a weight's initial values, or their constant value.

        `None` if the module makes other values.
        """
        initial = self.weights[path].declaration.initial
        if isinstance(initial, Random):
            return initial.deviation(self.sizes[path])
        return initial.value if isinstance(initial, Constant) else None


def _scaled(model: _Known, base: _Known) -> Scaled:
    for path in sorted(model.weights.keys() ^ base.weights.keys()):
        where, other = ("model", "base") if path in model.weights else ("base", "model")
        raise ValueError(
            f"the {where} has a weight {path}, and the {other} of scaling has none: give "
            "scaling.base sizes that change no more than sizes, such as layers in whole patterns"
        )
    width, depth = model.width() / base.width(), max(model.layers, 1) / max(base.layers, 1)
    if depth != 1 and model.normed:
        raise ValueError(
            f"the base of scaling has {base.layers} layers and the model {model.layers}, and its "
            "layers norm what they write, for which CompleteP has no rule: give scaling.base as "
            "many layers"
        )
    scales_last = any((model.first_size(path) or 0) > 0 for path in model.last)
    if width != 1 and model.tied and not scales_last:
        raise ValueError(
            "the model is tied, and scales nothing after its layers that scaling could make "
            "smaller with width: untie it, or give its last norm a scale that starts above zero"
        )
    factors = {path: _factors(path, model, base, width, depth) for path in model.weights}
    return Scaled(model.sizes, base.sizes, factors)


def _writes(weight: Weight) -> bool:
    """True if the output of a layer's weight is added to the residual stream."""
    summed, said = weight.declaration.summed, weight.declaration.writes
    makes_it = bool(summed) and RESIDUAL in weight.own_axes and RESIDUAL not in summed
    return makes_it if said is None else said


def _factors(path: str, model: _Known, base: _Known, width: float, depth: float) -> Factors:
    weight, sizes, base_sizes = model.weights[path], model.sizes[path], base.sizes[path]
    for axis in _OF_HEADS:
        if sizes.get(axis) != base_sizes.get(axis):
            raise ValueError(
                f"{axis} is {base_sizes.get(axis)} in the base of scaling and {sizes.get(axis)} in "
                "the model: let the number of heads grow in its place, scaling.base['heads'], so "
                "that scores are products of as many numbers"
            )
    summed = set(weight.declaration.summed)

    def grown(axes: Sequence[str]) -> float:
        return math.prod(sizes[axis] / base_sizes[axis] for axis in axes)

    inputs = grown([axis for axis in weight.own_axes if axis in summed])
    outputs = grown([axis for axis in weight.own_axes if axis not in summed])
    bound = min if inputs > 1 else max
    narrowing = 1.0 if inputs == 1 else bound(1.0, outputs / inputs)
    writing = 1 / depth if weight.stacked and _writes(weight) else 1.0
    last = 1 / width if path in model.last else 1.0
    initial = writing * last * math.sqrt(narrowing / inputs)
    own, of_base = model.first_size(path), base.first_size(path)
    return Factors(
        initial=initial * of_base / own if own and of_base else 1.0,
        multiplier=narrowing * writing * last,
        epsilon=1 / (width * depth) if weight.stacked else 1 / width,
        rate=writing * last / inputs,
        writing=writing,
    )
