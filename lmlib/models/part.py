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
from lmlib.models.context import Context
from lmlib.models.weights import product_flops
from lmlib.parallel.axes import PartError

Norm = Callable[[Array], Array]


class Names(NamedTuple):
    """Names that a part gives to its activations and operations, in the order of computation.

    Attributes:
      saved: activations that may be saved for the backward pass
        (`jax.ad_checkpoint.checkpoint_name`).
      scopes: groups of operations (`jax.named_scope`) whose time and FLOPs are shown separately.
    """

    saved: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()


def joined(*names: Names) -> Names:
    """Concatenates names in their order and removes duplicates."""
    return Names(
        tuple(dict.fromkeys(name for each in names for name in each.saved)),
        tuple(dict.fromkeys(name for each in names for name in each.scopes)),
    )


class Reports(NamedTuple):
    """The reports of a part about its tokens.

    Each value is a sum over the positions that count (`Context.total`), and depends only on the row
    of a position. Sums over microbatches and devices then equal the sums of the whole batch.

    Attributes:
      losses: scalars that an objective may minimise, by name (`Objective.model_losses`), such as a
        router's balance.
      statistics: scalars to watch, by name, without gradient.
      tallies: any tree, from which `Part.updated` changes weights without a gradient.
    """

    losses: dict[str, Float[Array, ""]]
    statistics: dict[str, Float[Array, ""]]
    tallies: Any = None


NO_REPORTS = Reports({}, {})


class Part(eqx.Module):
    """A piece of a model. A subclass defines `__call__` and overrides the methods that differ.

    By default a part counts the FLOPs of the products with its weights, keeps nothing between
    calls, and accepts all settings. The defaults include the parts inside this one.

    There are three kinds of parts. The input x of mixers and MLPs is whole along `seq`, and y is
    added to the residual stream, in the layout that `context.compute.residual` names:

    - a mixer: `(x_BSE, context, cache=None) -> (y_BSE, new cache)`
    - an MLP: `(x_BSE, context) -> (y_BSE, Reports)`
    - a layer: `(x_BSE, context, cache=None) -> (residual stream, Reports, new cache)`

    Attributes:
      rows_may_be_split: True if the part uses only the positions, segments and order of its
        context, and so may run if devices share the tokens of a row (`lmlib.models.split_rows`).
        Each class must declare it; a subclass does not inherit it.
    """

    rows_may_be_split = False

    @abstractmethod
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Computes the part. The arguments depend on its kind."""

    @property
    def subparts(self) -> tuple["Part", ...]:
        """The parts directly inside this one, in the order of its fields."""
        nodes = jax.tree.leaves(self, is_leaf=lambda node: _is_part(node) and node is not self)
        return tuple(filter(_is_part, nodes))

    @property
    def names(self) -> Names:
        """Names of the part's activations and scopes."""
        return joined(*(part.names for part in self.subparts))

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """Keys of the values that the part reads from `Context.shared`.

        The stack computes the value of a key that is a function of the context, such as a `Rotary`,
        once for all layers. It also provides `FIRST_RESIDUAL`; the model provides `TOKENS` and its
        own keys.
        """
        return tuple(dict.fromkeys(key for part in self.subparts for key in part.reads))

    @property
    def switches(self) -> tuple[int, ...]:
        """Text lengths, in tokens, beyond which the part computes the whole text differently.

        The cache of a text that grows beyond one is computed again.
        """
        return tuple(dict.fromkeys(length for part in self.subparts for length in part.switches))

    @property
    def used_shares(self) -> dict[str, float]:
        """The fraction of weights that a token uses, for each field that it uses partially."""
        return {}

    @property
    def gradient_problem(self) -> str | None:
        """The reason why the loss gives the weights no gradient, and the remedy; else `None`."""
        return None

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Returns the FLOPs of the forward and backward pass for one token.

        Rematerialization does not count (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Only
        active experts count. If `causal`, only the keys that the mask leaves count.
        """
        subparts = self.subparts
        own = jax.tree.map(
            lambda node: None if _is_part(node) else node,
            self,
            is_leaf=lambda node: _is_part(node) and node is not self,
        )
        return product_flops(own) + sum(
            part.flops_per_token(sequence_length, causal) for part in subparts
        )

    def check(self, sequence_length: int, compute: Compute) -> None:
        """Raises ValueError if the part cannot compute rows of this length with `compute`."""
        for part in self.subparts:
            part.check(sequence_length, compute)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """Returns the `cache` of a first call, for `rows` texts of up to `length` tokens.

        `None` means that the part does not support a cache. The first axis of each array is the
        row. In each row the tokens of a call follow the tokens of earlier calls. Tokens at negative
        positions, at a row's end, are padding and are not stored.
        """
        return None

    def attention_weights(self, x_BSE: Array, context: Context) -> Float[Array, "b heads s t"]:
        """Returns the weight of each position t in the output at each position s.

        Takes the same x as a call.

        Raises:
          ValueError: if the part does not take weighted means of positions.
        """
        raise ValueError(
            f"{class_name(self)} shows no attention weights: it does not define the method "
            "`attention_weights` of lmlib.models.part.Part"
        )

    def updated(self, tallies: Any) -> Any:
        """Returns the part after a step, with new values of its weights without a gradient.

        These weights are declared with `weight(…, gradient=False)`. They have the layout of a call
        and the dtype in which they are stored; all other weights are `None` here.

        Args:
          tallies: the tallies of the whole batch.
        """
        return self

    def measured(self, tallies: Any) -> dict[str, Float[Array, ""]]:
        """Returns metrics of a step, without gradient.

        The log shows the mean over the layers that have them. Weights are `None` or stacked here.

        Args:
          tallies: the tallies of the whole batch.
        """
        return {}


def check_part(part: Any, *arguments: str) -> None:
    """Checks that `part` is a `Part` that can be called with the named `arguments`.

    Raises:
      ValueError: with the class of `part` and the remedy.
    """
    name = class_name(part)
    if not _is_part(part):
        raise ValueError(
            f"{name} is not a lmlib.models.part.Part: make it a subclass, which has defaults for "
            "all but the call"
        )
    try:
        inspect.signature(part).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is called with ({', '.join(arguments)}), which its `__call__` does not take: "
            f"{error}"
        ) from None
    names = part.names
    if not isinstance(names, Names) or str in map(type, names):
        raise ValueError(
            f"{name}.names must be a lmlib.models.part.Names of two tuples of names, such as "
            f"`Names(saved=('hidden',))`, got {names!r}"
        )


# An array is a sequence too. Without the following checks, a part that returns one array instead of
# two results would be unpacked along the batch.
_MEANINGS = {
    "y_BSE": "an array like its input",
    "cache": "the new cache, None if it was given none",
    "reports": "a lmlib.models.part.Reports, NO_REPORTS for none",
}


def checked(part: Any, returned: Any, x_BSE: Array, *others: str) -> Any:
    """Checks the result of a part's call and returns it.

    Args:
      returned: must be a tuple of an array that can be added to `x_BSE`, and of `others`.
      x_BSE: the residual stream.
      others: names of the other results, "cache" or "reports".

    Raises:
      PartError: with the part's class, if the result is anything else.
    """
    expected = ("y_BSE", *others)
    if type(returned) is not tuple or len(returned) != len(expected):
        meanings = "; ".join(f"{name}: {_MEANINGS[name]}" for name in expected)
        raise PartError(
            f"{class_name(part)} must return a tuple ({', '.join(expected)}), got "
            f"{_text(returned)} ({meanings})"
        )
    check_like(part, returned[0], x_BSE)
    if "reports" in others:
        _check_reports(part, returned[expected.index("reports")])
    return returned


def check_like(part: Any, y_BSE: Any, x_BSE: Array) -> None:
    """Raises PartError if `y_BSE` differs from `x_BSE` in shape, dtype or layout.

    An array that broadcasts to `x_BSE` would otherwise be added without an error.
    """
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
            f"{class_name(part)} must return an array that lies as the residual stream does, "
            f"{jax.typeof(x_BSE)}, got {jax.typeof(y_BSE)}; give the last product "
            "`out_sharding=spec(context.compute.residual)`, or return "
            "`reshard(y_BSE, context.compute.residual)`, both of lmlib.parallel.layout"
        ) from error


def check_scalars(part: Any, what: str, values: Any) -> None:
    """Raises PartError if `values`, given by `part` as `what`, is not a mapping of scalars.

    JAX would average the elements of an array together with the layers.
    """
    if not isinstance(values, Mapping):
        raise PartError(
            f"{class_name(part)} must give {what} as a mapping of names, got {_text(values)}"
        )
    for name, value in values.items():
        if getattr(value, "shape", None) != ():
            raise PartError(
                f"{class_name(part)} must give a JAX scalar as {what}[{name!r}], got "
                f"{_text(value)}; `context.total` sums over the positions that count"
            )


def _check_reports(part: Any, reports: Any) -> None:
    if not isinstance(reports, Reports):
        raise PartError(
            f"{class_name(part)} must return reports, a lmlib.models.part.Reports (NO_REPORTS for "
            f"none), got {_text(reports)}"
        )
    check_scalars(part, "losses", reports.losses)
    check_scalars(part, "statistics", reports.statistics)


def _text(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{[*value.shape]}"
    if isinstance(value, tuple) and type(value) is tuple:
        return f"a tuple of {len(value)}: {', '.join(map(_text, value))}"
    return repr(value) if value is None else f"a {type(value).__name__}"


def class_name(part: Any) -> str:
    """Returns the full name of the class of `part`, for error messages."""
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _is_part(node: Any) -> bool:
    return isinstance(node, Part)
