"""Learning rates and initial values that a small model hands on to larger ones, wider and deeper.

What is best for the small model, the base, is then near the best for the others: µP for width (Yang
et al. 2022, arXiv:2203.03466) and CompleteP for depth (Dey et al. 2025, arXiv:2505.01618, table 1,
with α = 1). Both say how initial values, learning rates, Adam's epsilon and some multipliers follow
from sizes. Here a multiplier is part of its weight: c · W with W's values and rate is the weight
c W with c times both. So the model stays what its family makes, and is saved, exported and sampled
as ever.

A weight of `inputs` times as many inputs as in the base (over the axes that products sum over), and
of `outputs` times as many outputs, in a stack `depth` times as deep, has

    narrowing n   1 if inputs = 1, else min(1, outputs / inputs): 1 for what is as wide at both
                  ends, 1 / inputs for what narrows to a fixed size, as the unembedding does
    writing w     1 / depth if it writes to the residual stream, in a layer; else 1

                      initial values       Adam's rate      Muon's rate
    matrices          w √(n / inputs)      w / inputs       w √(outputs / inputs) / √largest
    tables, vectors   w                    w                as Adam's

each as a factor of the base's; `largest` is how much the larger side of the matrix has grown. Both
rates come from one condition: what an update changes of an output must be of the same size in every
model, so that updates have spectral norms that go as √(outputs / inputs) (Yang, Simon & Bernstein
2023, arXiv:2310.17813, condition 1). Adam's updates have elements of a given size and low rank,
and so norms that go as √(inputs · outputs); Muon's are orthogonal matrices times √largest.

The last norm of a tied model has the factor 1 / width, of initial values and rate, in place of the
unembedding. Weight decay is not multiplied by these factors: a step takes the same share of a
weight in every model. Epsilon has the factor 1 / width, in layers 1 / (width · depth), as gradients
have, which clipping and epsilon see with respect to W.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array

from lmlib.models.matrices.adapted import has_adapters
from lmlib.models.model import check_is_model
from lmlib.models.weights import Constant, Random
from lmlib.optim.optimizer import by_weight
from lmlib.parallel.axes import Weight, map_weights

RESIDUAL = "embed"  # the axis of the residual stream, as `lmlib.models.model.Model` names it
_OF_HEADS = "head_dim"


class Factors(NamedTuple):
    """Of one weight.

    Attributes:
      initial: what its family's initial values are multiplied by.
      multiplier: c, where the paper has c · W in place of the weight.
      epsilon: of Adam's, for the gradient with respect to W.
      rate: of Adam's learning rate, for the weight as it is.
      writing: of what it adds to the residual stream, which is in `rate` too.
    """

    initial: float
    multiplier: float
    epsilon: float
    rate: float
    writing: float


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A model's weights beside those of its base.

    Attributes:
      sizes, base: of each weight's axes, by its path.
      factors: of each weight, by its path.
    """

    sizes: Mapping[str, Mapping[str, int]]
    base: Mapping[str, Mapping[str, int]]
    factors: Mapping[str, Factors]

    def begun(self, model: Any) -> Any:
        """`model`, as its family makes it, with the initial values that the base hands on."""

        def scaled(weight: Weight, array: Array) -> Array:
            factor = self.factors[weight.path].initial
            return array if factor == 1 else array * factor

        return map_weights(scaled, model)

    def before_clipping(self) -> optax.GradientTransformation:
        """Gradients with respect to W, of those with respect to weights."""
        return by_weight(lambda weight: self.factors[weight.path].multiplier)

    def of_adam(self, adam: optax.GradientTransformation) -> optax.GradientTransformation:
        """`adam` with the epsilon and the learning rate of each weight."""
        factors = self.factors
        # Other gradients are what another epsilon is to Adam.
        return optax.chain(
            by_weight(lambda weight: 1 / factors[weight.path].epsilon),
            adam,
            by_weight(lambda weight: factors[weight.path].rate),
        )

    def of_orthogonal(self, weight: Weight, apart: Collection[str] = ()) -> float:
        """The factor of the learning rate for updates that are orthogonal matrices times
        √(the larger of both sides). Along the axes `apart` each index is a matrix by itself."""
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
    """For `Experiment.scaling`: rates and initial values are those of a base model, handed on.

    Args:
      base: sizes of the base, as arguments of the model that it has otherwise: {"embed": 64,
        "heads": 1, "mlp": 192, "layers": 2}. What is not named is as large in the base.

    Raises:
      ValueError: if there are none, or one is not positive.
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
        """Of the model that `make(key=…)` makes, and its base; makes no array.

        Raises:
          ValueError: if the model has adapters, `make` does not take the sizes, or what both make
            are not the same but for sizes; and where the rule knows no answer: heads that grow,
            norms after what layers write, a tied model without a last norm.
        """
        model = _shapes(make)
        check_is_model(model)
        if has_adapters(model):
            raise ValueError(
                "scaling is for models that train from their first values on, and this one has "
                "adapters: leave out scaling, or the adapters"
            )
        base = self._base_shapes(make)
        return _scaled(_Known.of(model), _Known.of(base))

    def _base_shapes(self, make: Callable[..., Any]) -> Any:
        try:
            return _shapes(functools.partial(make, **self.base))
        except TypeError as error:
            raise ValueError(
                f"the model takes no such sizes as scaling.base has, {dict(self.base)}: {error}"
            ) from None
        except ValueError as error:
            raise ValueError(
                f"of the sizes in scaling.base no model can be made: {error}"
            ) from None


def _shapes(make: Callable[..., Any]) -> Any:
    return jax.eval_shape(lambda: make(key=jax.random.key(0)))


class _Known(NamedTuple):
    """What the rule asks of a model.

    Attributes:
      weights, sizes: by path, the sizes of axes by name.
      layers: how many there are.
      last: paths of the weights after the layers but for the unembedding, if the model is tied.
      normed: whether a layer norms what it writes.
    """

    weights: Mapping[str, Weight]
    sizes: Mapping[str, Mapping[str, int]]
    layers: int
    last: frozenset[str]
    normed: bool

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
        return cls(
            weights,
            sizes,
            sum(len(parts[number].layers or ()) for number in in_layers),
            frozenset(path for path in last if path is not None),
            any(_norms_what_it_writes(parts[number].weights) for number in in_layers),
        )

    def width(self) -> int:
        """Of the residual stream."""
        return next((sizes[RESIDUAL] for sizes in self.sizes.values() if RESIDUAL in sizes), 1)

    def first_size(self, path: str) -> float | None:
        """The standard deviation of a weight's initial values, or what they all are; `None`: its
        module makes others."""
        initial = self.weights[path].declaration.initial
        if isinstance(initial, Random):
            return initial.deviation(self.sizes[path])
        return initial.value if isinstance(initial, Constant) else None


def _norms_what_it_writes(layer: Any) -> bool:
    after = ("attention_after_norm", "mlp_after_norm")
    return any(getattr(layer, name, None) is not None for name in after)


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
    if width != 1 and _is_tied_without_norm(model):
        raise ValueError(
            "the model is tied, and scales nothing after its layers that scaling could make "
            "smaller with width: untie it, or give its last norm a scale that starts above zero"
        )
    factors = {path: _factors(path, model, base, width, depth) for path in model.weights}
    return Scaled(model.sizes, base.sizes, factors)


def _writes(weight: Weight) -> bool:
    """Whether what a weight of a layer makes is added to the residual stream."""
    summed, said = weight.declaration.summed, weight.declaration.writes
    makes_it = bool(summed) and RESIDUAL in weight.own_axes and RESIDUAL not in summed
    return makes_it if said is None else said


def _is_tied_without_norm(model: _Known) -> bool:
    tied = not any(
        "vocab" in weight.axes and weight.declaration.summed for weight in model.weights.values()
    )
    return tied and not any((model.first_size(path) or 0) > 0 for path in model.last)


def _factors(path: str, model: _Known, base: _Known, width: float, depth: float) -> Factors:
    weight, sizes, base_sizes = model.weights[path], model.sizes[path], base.sizes[path]
    if sizes.get(_OF_HEADS) != base_sizes.get(_OF_HEADS):
        raise ValueError(
            f"head_dim is {base_sizes.get(_OF_HEADS)} in the base of scaling and "
            f"{sizes.get(_OF_HEADS)} in the model: let the number of heads grow in its place, "
            "scaling.base['heads'], so that scores are products of as many numbers"
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
