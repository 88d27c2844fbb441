"""The base class of the pieces of a model: mixers, MLPs, norms, positions, layers.

Methods of a part see the arrays of one layer, never of a whole stack.

Shapes: B batch, S sequence (queries), T sequence (keys), E embed.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.models.forward_context import ForwardContext
from lmlib.models.weights import product_flops
from lmlib.parallel.axes import PartError

Norm = Callable[[Array], Array]


class ActivationNames(NamedTuple):
    """Names of a part's activations and scopes, in the order of computation."""

    saved: tuple[str, ...] = ()  # may be saved for the backward pass (`checkpoint_name`)
    scopes: tuple[str, ...] = ()  # time and FLOPs are shown separately (`jax.named_scope`)


def merge_names(*names: ActivationNames) -> ActivationNames:
    """Concatenates names in their order, without duplicates."""
    return ActivationNames(
        tuple(dict.fromkeys(name for each in names for name in each.saved)),
        tuple(dict.fromkeys(name for each in names for name in each.scopes)),
    )


class AuxOutputs(NamedTuple):
    """The reports of a part about its tokens, summed over positions that count (`Context.total`).

    A value depends only on the row of a position, so sums over microbatches and devices add up.
    """

    losses: dict[str, Float[Array, ""]]
    statistics: dict[str, Float[Array, ""]]
    tallies: Any = None  # any tree, for `Part.updated`; a node's `combined()` replaces the sum


NO_AUX = AuxOutputs({}, {})


class Part(eqx.Module):
    """A piece of a model. A subclass defines `__call__` and overrides the methods that differ.

    Defaults include the parts inside this one. x is whole along `seq`; y has the layout that
    `context.compute.residual` names:

    - a mixer: `(x_BSE, context, cache=None) -> (y_BSE, new cache)`
    - an MLP: `(x_BSE, context) -> (y_BSE, AuxOutputs)`
    - a layer: `(x_BSE, context, cache=None) -> (residual stream, AuxOutputs, new cache)`

    Each class that may run where devices share the tokens of a row sets `rows_may_be_split = True`.
    """

    rows_may_be_split = False

    @abstractmethod
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Computes the part. The arguments depend on its kind."""

    @property
    def subparts(self) -> tuple["Part", ...]:
        """The parts directly inside this one, in the order of its fields."""
        return tuple(filter(_is_part, jax.tree.leaves(self, is_leaf=self._is_subpart)))

    def _is_subpart(self, node: Any) -> bool:
        return _is_part(node) and node is not self

    @property
    def names(self) -> ActivationNames:
        """Names of the part's activations and scopes."""
        return merge_names(*(part.names for part in self.subparts))

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """Keys that the part reads from `Context.shared`; functions of the context are called."""
        return tuple(dict.fromkeys(key for part in self.subparts for key in part.reads))

    @property
    def used_shares(self) -> dict[str, float]:
        """The fraction of weights that a token uses, for each field that it uses partially."""
        return {}

    @property
    def gradient_problem(self) -> str | None:
        """The reason why the loss gives the weights no gradient, and the remedy."""
        return None

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Returns the FLOPs of one token, forward and backward, without rematerialization.

        Inactive experts do not count, nor, if `causal`, masked keys (arXiv:2204.02311, appendix B).
        """
        own = eqx.filter(self, lambda node: not _is_part(node), is_leaf=self._is_subpart)
        inside = (part.flops_per_token(sequence_length, causal) for part in self.subparts)
        return product_flops(own) + sum(inside)

    def check(self, sequence_length: int, compute: Compute) -> None:
        """Raises ValueError if the part cannot compute rows of this length with `compute`."""
        for part in self.subparts:
            part.check(sequence_length, compute)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """Returns the `cache` of a first call for `rows` texts of `length` tokens, or `None`.

        The first axis of each array is the row. Tokens at negative positions, at its end, are
        padding.
        """
        return None

    def attention_weights(
        self, x_BSE: Array, context: ForwardContext
    ) -> Float[Array, "b heads s t"]:
        """Returns the weight of each position t in the output at s, or raises ValueError."""
        raise ValueError(
            f"{class_name(self)} shows no attention weights: it does not define the method "
            "`attention_weights` of lmlib.models.part.Part"
        )

    def updated(self, tallies: Any) -> Any:
        """Returns the part after a step, with new weights of `weight(…, gradient=False)`.

        `tallies` are summed over the batch. All other weights are `None` here.
        """
        return self

    def measured(self, tallies: Any) -> dict[str, Float[Array, ""]]:
        """Returns metrics of a step from the batch's tallies; the log has the mean over layers."""
        return {}


def check_part(part: Any, *arguments: str) -> None:
    """Raises ValueError if `part` is not a `Part` that takes the named `arguments`."""
    name = class_name(part)
    if not _is_part(part):
        raise ValueError(f"{name} is not a lmlib.models.part.Part: make it a subclass")
    try:
        inspect.signature(part).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is called with ({', '.join(arguments)}), which its `__call__` does not take: "
            f"{error}"
        ) from None
    if not isinstance(part.names, ActivationNames) or str in map(type, part.names):
        raise ValueError(
            f"{name}.names must be a lmlib.models.part.ActivationNames of two tuples of names, "
            f"such as `ActivationNames(saved=('hidden',))`, got {part.names!r}"
        )


def checked(part: Any, returned: Any, x_BSE: Array, *others: str) -> Any:
    """Returns the result of a part's call: an array like `x_BSE`, and "cache" or "reports"."""
    expected = ("y_BSE", *others)
    if type(returned) is not tuple or len(returned) != len(expected):
        raise PartError(
            f"{class_name(part)} must return a tuple ({', '.join(expected)}), got "
            f"{_text(returned)}; without auxiliary outputs it returns NO_AUX, without a cache None"
        )
    check_like(part, returned[0], x_BSE)
    if "reports" in others:
        aux = returned[expected.index("reports")]
        if not isinstance(aux, AuxOutputs):
            raise PartError(
                f"{class_name(part)} must return aux, a lmlib.models.part.AuxOutputs (NO_AUX "
                f"for none), got {_text(aux)}"
            )
        check_scalars(part, "losses", aux.losses)
        check_scalars(part, "statistics", aux.statistics)
    return returned


def check_like(part: Any, y_BSE: Any, x_BSE: Array) -> None:
    """Raises PartError if `y_BSE` and `x_BSE` differ in shape, dtype or layout."""
    shape, dtype = getattr(y_BSE, "shape", None), getattr(y_BSE, "dtype", None)
    if (shape, dtype) != (x_BSE.shape, x_BSE.dtype):
        raise PartError(
            f"{class_name(part)} must return an array of the shape and dtype of its input, "
            f"{_text(x_BSE)}, got {_text(y_BSE)}"
        )
    try:
        jax.eval_shape(jnp.add, x_BSE, y_BSE)
    except Exception as error:  # same shape and dtype, so the layouts differ
        raise PartError(
            f"{class_name(part)} must return an array in the layout of the residual stream, "
            f"{jax.typeof(x_BSE)}, got {jax.typeof(y_BSE)}; return `reshard(y_BSE, "
            "context.compute.residual)` of lmlib.parallel.layout"
        ) from error


def check_scalars(part: Any, what: str, values: Any) -> None:
    """Raises PartError if `values` is not a mapping of scalars: a mean would hide the others."""
    if not isinstance(values, Mapping):
        raise PartError(f"{class_name(part)} must give {what} as a mapping, got {_text(values)}")
    for name, value in values.items():
        if getattr(value, "shape", None) != ():
            raise PartError(
                f"{class_name(part)} must give a JAX scalar as {what}[{name!r}], got "
                f"{_text(value)}; `context.total` sums over the positions that count"
            )


def _text(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{[*value.shape]}"
    if type(value) is tuple:
        return f"a tuple of {len(value)}: {', '.join(map(_text, value))}"
    return "None" if value is None else f"a {type(value).__name__}"


def class_name(part: Any) -> str:
    """Returns the full name of the class of `part`, for error messages."""
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _is_part(node: Any) -> bool:
    return isinstance(node, Part)
