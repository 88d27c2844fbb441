"""LoRA: a frozen matrix plus the product of two small trainable ones.

Shapes: R rank.
"""

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.matmul import matmul, matmul_of_arrays
from lmlib.models.weights import Random, fold_in_name, zeros
from lmlib.parallel.axes import METADATA, Declaration, LayoutError, M, Weight
from lmlib.parallel.layout import COMPUTE
from lmlib.parallel.matrix import Matrix, counts, dense
from lmlib.parallel.mesh_axes import TENSOR_AXES, names_of

DOWN_RANK, UP_RANK = "down_rank", "up_rank"  # the rank's axis in `down` and in `up`
EXPERTS, CHOICE = "experts", "choice"  # axes of experts, and of their router


class LoRAMatrix(Matrix):
    """base + scale · down · up (LoRA: Hu et al. 2021, arXiv:2106.09685, eq. 3).

    The base gets no gradient. `down` has the axes of `base` that products sum over, then the rank;
    `up` has the rank, then the other axes; axes of stacked layers and of experts come first in
    both. The axes have the same layouts as in `base`. The rank is split over `tensor` if no axis of
    `down` is, and there are no experts.
    """

    rows_may_be_split = True

    base: Any = eqx.field(metadata={METADATA: lambda self: self.declaration})
    down: Float[Array, "..."] = eqx.field(metadata={METADATA: lambda self: self.low_rank(True)})
    up: Float[Array, "..."] = eqx.field(metadata={METADATA: lambda self: self.low_rank(False)})
    alpha: float = eqx.field(static=True)  # the scale is alpha / rank, or
    rank_stabilized: bool = eqx.field(static=True)  # alpha / √rank
    dropout: float = eqx.field(static=True)  # rate, for the input of `down`
    declaration: Declaration = eqx.field(static=True)  # of `base`
    axis_names: dict[str, str] = eqx.field(static=True)  # of the three arrays
    key: PRNGKeyArray | None = None  # for dropout, in a training step

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def size(self) -> int:
        return self.base.size

    @property
    def ndim(self) -> int:
        return len(self.base.shape)

    @property
    def rank(self) -> int:
        return self.down.shape[-1]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes of `base` that products sum over."""
        return summed_axes(self.declaration, self.axis_names["base"].split())

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes of `base` along which each index is a separate matrix."""
        return experts_axes(self.axis_names["base"].split())

    @property
    def is_random(self) -> bool:
        return self.dropout > 0

    def with_key(self, key: PRNGKeyArray) -> "LoRAMatrix":
        return dataclasses.replace(self, key=key)

    def gets_gradient(self) -> Any:
        """See `Matrix.gets_gradient`; False for the base."""
        every = jax.tree.map(lambda _: True, self)
        return eqx.tree_at(lambda one: one.base, every, replace=False)

    def counts(self) -> "LoRAMatrix":
        if self.base is None:  # trained weights alone
            return super().counts()
        return eqx.tree_at(lambda one: one.base, super().counts(), counts(self.base))

    def gathered(self, dtype: DTypeLike, after: Array | None) -> "LoRAMatrix":
        if not isinstance(self.base, Matrix):
            return self
        return dataclasses.replace(self, base=self.base.gathered(dtype, after))

    def einsum(
        self, equation: str, x: Array, precision: str | None, out_sharding: PartitionSpec | None
    ) -> Float[Array, "..."]:
        y = matmul(equation, x, jax.lax.stop_gradient(self.base), precision, out_sharding)
        return y + low_rank_product(equation, dropped(x, self), self, out_sharding)

    def apply(self, multiply: Callable[[Array, Array], Array], x: Array) -> Array:
        added = multiply(multiply(x, self.down), self.up)
        return multiply(x, jax.lax.stop_gradient(self.base)) + self.scale * added

    def dense(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
        """base + scale · down · up, in float32 or wider, in the layout of `base`."""
        base = dense(self.base)
        wide = jnp.promote_types(base.dtype, dtype)
        down, up, layout = self.down, self.up, None
        stacked, summed = base.ndim - len(self.axis_names["base"].split()), self.down.ndim - 1
        lead = stacked + len(self.apart)
        if not jax.sharding.get_abstract_mesh().empty:
            layout = jax.typeof(base).sharding.spec
            places = layout.partitions
            down = jax.sharding.reshard(down, PartitionSpec(*places[:summed], None))
            up = jax.sharding.reshard(up, PartitionSpec(*places[:lead], None, *places[summed:]))
        letters = string.ascii_lowercase[: base.ndim]
        rows, kept = letters[:summed], letters[summed:]
        equation = f"{rows}z,{letters[:lead]}z{kept}->{letters}"
        added = jnp.einsum(equation, down.astype(wide), up.astype(wide), out_sharding=layout)
        return base.astype(wide) + self.scale * added

    def low_rank(self, down: bool) -> Declaration:
        """The declaration of `down`, of variance 1 / (3 · fan_in), or of `up`, zero, as in PEFT."""
        rules = {**COMPUTE, **self.declaration.rules}
        taken = self.apart or any(rules[axis] == rules[DOWN_RANK] for axis in self.summed)
        rules = {**self.declaration.rules, **({DOWN_RANK: None} if taken else {})}
        initial = Random(3**-0.5, self.summed) if down else zeros
        summed = self.summed if down else (UP_RANK,)
        return Declaration(initial, decays=True, rules=rules, summed=summed)


def adapted(
    weight: Weight,
    base: Array,
    rank: int,
    alpha: float,
    rank_stabilized: bool,
    dropout: float,
    key: PRNGKeyArray,
) -> LoRAMatrix:
    """Adds new low-rank matrices to `base`, the array of `weight`.

    Raises LayoutError if products do not sum over its first axes after the axis of experts.
    """
    stacked, axes = weight.stacked, weight.own_axes
    summed, apart = summed_axes(weight.declaration, axes), experts_axes(axes)
    rows, kept = (*apart, *summed), axes[len(apart) + len(summed) :]
    if axes[: len(rows)] != rows or not kept:
        raise LayoutError(
            f"{weight.path} ({' '.join(axes)}) cannot be adapted: products sum over "
            f"{' '.join(summed)}, which are not its first axes"
        )
    sizes = dict(zip(axes, base.shape[stacked:], strict=True))
    lead = tuple(base.shape[:stacked])
    of_arrays = {"base": axes, "down": (*rows, DOWN_RANK), "up": (*apart, UP_RANK, *kept)}
    names = {field: " ".join(of_array) for field, of_array in of_arrays.items()}
    declared = weight.declaration
    empty = LoRAMatrix(base, base, base, alpha, rank_stabilized, dropout, declared, names)

    def made(field: str) -> Array:
        initial = empty.low_rank(field == "down").initial
        every = sizes | {DOWN_RANK: rank, UP_RANK: rank}
        shape = (*lead, *(every[axis] for axis in names[field].split()))
        return initial.make(fold_in_name(fold_in_name(key, weight.path), field), shape, every)

    return dataclasses.replace(empty, down=made("down"), up=made("up"))


def can_be_adapted(weight: Weight) -> bool:
    """True for a matrix, or a table of the vocabulary, except for a router."""
    if CHOICE in weight.axes:
        return False
    return weight.declaration.multiplied or "vocab" in weight.axes


def experts_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """The axis of experts among the axes of one layer's weight, if it comes first."""
    return (EXPERTS,) if axes[0] == EXPERTS else ()


def summed_axes(declaration: Declaration, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes of a weight that products sum over; the first axis of a lookup table."""
    assert isinstance(declaration.initial, Random)
    return declaration.initial.summed or (axes[0],)


def is_adapted(node: Any) -> bool:
    return isinstance(node, LoRAMatrix)


def map_adapted(function: Callable[[str, LoRAMatrix], Any], tree: M) -> M:
    """Replaces each `LoRAMatrix` in `tree` by `function(path, adapted)`."""

    def visit(keys: Any, node: Any) -> Any:
        if not is_adapted(node):
            return node
        return function(jax.tree_util.keystr(keys, simple=True, separator="."), node)

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_adapted)


def without_adapters(model: M) -> M:
    """Returns `model` without adapters, as it was before they were added."""
    return map_adapted(lambda _, one: one.base, model)


def with_bases(model: M, bases: Any) -> M:
    """Replaces all weights of `model` except its adapters by `bases`, a model without adapters."""

    def beside(one: Any, base: Any) -> Any:
        return dataclasses.replace(one, base=base) if is_adapted(one) else base

    return jax.tree.map(beside, model, bases, is_leaf=is_adapted)


def has_adapters(tree: Any) -> bool:
    return any(map(is_adapted, jax.tree.leaves(tree, is_leaf=is_adapted)))


def low_rank_product(
    equation: str, x: Array, w: LoRAMatrix, out_sharding: PartitionSpec | None
) -> Array:
    """scale · (x · down) · up.

    If `tensor` splits the rank of `down`, its result is gathered over `tensor`; if it splits a
    summed axis, the result is summed.
    """
    operands, y_axes = equation.split("->")
    x_axes, w_axes = operands.split(",")
    rows = "".join(axis for axis in w_axes if axis in x_axes)
    apart = "".join(axis for axis in rows if axis in y_axes)  # experts
    lead, kept = x_axes[: len(apart) - len(rows)], "".join(a for a in w_axes if a not in x_axes)
    rank = next(letter for letter in string.ascii_lowercase if letter not in equation)
    down = f"{x_axes},{rows}{rank}->{lead}{rank}"
    up = f"{lead}{rank},{apart}{rank}{kept}->{y_axes}"
    w_up = w.up
    if jax.sharding.get_abstract_mesh().empty:
        h = matmul_of_arrays(down, x, w.down, None, None)
    elif jax.typeof(w.down).sharding.spec.partitions[-1] is not None:
        h = matmul_of_arrays(down, x, w.down, None, None)
        places = jax.typeof(h).sharding.spec.partitions
        h = jax.sharding.reshard(h, PartitionSpec(*places[:-1], None, reduced={*TENSOR_AXES}))
    else:
        places = (jax.typeof(x).sharding.spec if out_sharding is None else out_sharding).partitions
        h = matmul_of_arrays(down, x, w.down, None, PartitionSpec(*places[: len(lead)], None))
        over = {name for place in places[: len(lead)] for name in names_of(place)} & {*TENSOR_AXES}
        if over:  # sequence-parallel: the gradient of `up` is summed over it
            layout = jax.typeof(w_up).sharding.spec
            w_up = jax.sharding.reshard(w_up, layout.update(reduced={*layout.reduced, *over}))
    return w.scale * matmul_of_arrays(up, h, w_up, None, out_sharding)


def dropped(x: Array, w: LoRAMatrix) -> Array:
    """Applies dropout to the input of `down`, in training."""
    if w.key is None:
        return x
    layout = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec
    where = None if layout is None else PartitionSpec(*layout.partitions)
    kept = jax.random.bernoulli(w.key, 1 - w.dropout, x.shape, out_sharding=where)
    factor = (kept / (1 - w.dropout)).astype(x.dtype)
    return x * (factor if layout is None else jax.sharding.reshard(factor, layout))
