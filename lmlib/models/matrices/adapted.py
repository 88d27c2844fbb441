"""A matrix that stays as it is, and a product of two small ones beside it, which train (LoRA).

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
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.weights import Random, fold, zeros
from lmlib.parallel.axes import METADATA, Declaration, LayoutError, M, Weight
from lmlib.parallel.layout import COMPUTE

DOWN_RANK, UP_RANK = "down_rank", "up_rank"  # the rank's axis in each of the two
EXPERT, CHOICE = "expert", "choice"  # axes of experts, and of their router


class Adapted(eqx.Module):
    """base + scale · down · up. Products do not make it: `lmlib.models.product.product` multiplies
    by each of the three (LoRA: Hu et al. 2021, arXiv:2106.09685, eq. 3).

    `down` has the axes of `base` that products sum over, then the rank; `up` has the rank, then the
    others; before them, as in `base`, lie stacked layers. They lie on the mesh as these axes do,
    both split over `fsdp` too (`lmlib.parallel.layout.stored`). Over `tensor` the rank is split
    where no axis of `down` is.

    Experts, along the first axis of `base`, have a pair each, along the first axis of both; these
    lie on the devices of the experts, and their rank is whole.

    Attributes:
      base: an array, or a `lmlib.models.matrices.int8.Int8`.
      alpha, rank_stabilized: scale is alpha / rank, or alpha / √rank if it is stabilized.
      dropout: rate at which elements of what `down` multiplies are dropped in training.
      key: of that, in a layer of a step that trains; `None` otherwise.
      declaration: of `base`.
      axis_names: of the three.
    """

    rows_may_be_split = True

    base: Any = eqx.field(metadata={METADATA: lambda self: self.declaration})
    down: Float[Array, "..."] = eqx.field(metadata={METADATA: lambda self: self.low_rank(True)})
    up: Float[Array, "..."] = eqx.field(metadata={METADATA: lambda self: self.low_rank(False)})
    alpha: float = eqx.field(static=True)
    rank_stabilized: bool = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    declaration: Declaration = eqx.field(static=True)
    axis_names: dict[str, str] = eqx.field(static=True)
    key: PRNGKeyArray | None = None

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
        """The axes of `base` along which each index is a matrix by itself."""
        return experts_axes(self.axis_names["base"].split())

    def merged(self) -> Float[Array, "..."]:
        """base + scale · down · up, in float32 at least, which lies as `base` does."""
        base = self.base.in_use(jnp.float32) if hasattr(self.base, "in_use") else self.base
        wide = jnp.promote_types(base.dtype, jnp.float32)
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
        """Of `down` or `up`. The initial values are those of PEFT: `down` has variance 1 / (3 ·
        fan_in), `up` is zero, so that an adapted model starts as its base."""
        rules = {**COMPUTE, **self.declaration.rules}
        taken = self.apart or any(rules[axis] == rules[DOWN_RANK] for axis in self.summed)
        rules = {**self.declaration.rules, **({DOWN_RANK: None} if taken else {})}
        initial = Random(3**-0.5, self.summed) if down else zeros
        summed = self.summed if down else (UP_RANK,)
        return Declaration(initial, multiplied=True, decays=True, rules=rules, summed=summed)


def adapted(
    weight: Weight,
    base: Array,
    rank: int,
    alpha: float,
    rank_stabilized: bool,
    dropout: float,
    key: PRNGKeyArray,
) -> Adapted:
    """`base`, which `weight` describes, with new matrices beside it.

    Raises:
      LayoutError: if products do not sum over its first axes, or the first after that of experts.
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
    names = {
        "base": " ".join(axes),
        "down": " ".join((*rows, DOWN_RANK)),
        "up": " ".join((*apart, UP_RANK, *kept)),
    }
    empty = Adapted(
        base, base, base, alpha, rank_stabilized, dropout, weight.declaration, names
    )  # fmt: skip

    def made(field: str) -> Array:
        initial = empty.low_rank(field == "down").initial
        every = sizes | {DOWN_RANK: rank, UP_RANK: rank}
        shape = (*lead, *(every[axis] for axis in names[field].split()))
        return initial.make(fold(fold(key, weight.path), field), shape, every)

    return dataclasses.replace(empty, down=made("down"), up=made("up"))


def can_be_adapted(weight: Weight) -> bool:
    """Whether it is a matrix, or a table of the vocabulary, and not of a router."""
    if CHOICE in weight.axes:
        return False
    return weight.declaration.multiplied or "vocab" in weight.axes


def experts_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Of the axes of one layer's weight that of experts, if it comes first."""
    return (EXPERT,) if axes[0] == EXPERT else ()


def summed_axes(declaration: Declaration, axes: Sequence[str]) -> tuple[str, ...]:
    """Of a weight's axes, those that products sum over; of a table that is looked up, the first."""
    assert isinstance(declaration.initial, Random)
    return declaration.initial.summed or (axes[0],)


def is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)


def map_adapted(function: Callable[[str, Adapted], Any], tree: M) -> M:
    """`tree` with each `Adapted` replaced by `function(path, adapted)`."""

    def visit(keys: Any, node: Any) -> Any:
        if not is_adapted(node):
            return node
        return function(jax.tree_util.keystr(keys, simple=True, separator="."), node)

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_adapted)


def without_adapters(model: M) -> M:
    """The base of `model`: what it was before it was adapted."""
    return map_adapted(lambda _, one: one.base, model)


def with_bases(model: M, bases: Any) -> M:
    """`model` with the weights of `bases`, which is `model` without its adapters: it keeps its
    adapters alone."""

    def beside(one: Any, base: Any) -> Any:
        return dataclasses.replace(one, base=base) if is_adapted(one) else base

    return jax.tree.map(beside, model, bases, is_leaf=is_adapted)


def whole(table: Array | Adapted) -> Array:
    """A table as one array."""
    return table.merged() if isinstance(table, Adapted) else table


def gets_gradient(tree: M) -> M:
    """For each array of `tree` whether it may have a gradient: bases of adapters have none."""

    def of(node: Any) -> Any:
        if not is_adapted(node):
            return True
        every = jax.tree.map(lambda _: True, node)
        return eqx.tree_at(lambda one: one.base, every, replace=False)

    return jax.tree.map(of, tree, is_leaf=is_adapted)


def has_adapters(tree: Any) -> bool:
    return any(map(is_adapted, jax.tree.leaves(tree, is_leaf=is_adapted)))


def drops(tree: Any) -> bool:
    """Whether an adapter in it drops elements in training."""
    nodes = jax.tree.leaves(tree, is_leaf=is_adapted)
    return any(is_adapted(node) and node.dropout > 0 for node in nodes)


def with_keys(block: M, key: PRNGKeyArray) -> M:
    """`block` with a key of its own in each adapter."""
    return map_adapted(
        lambda path, one: dataclasses.replace(one, key=fold(key, path)) if one.dropout else one,
        block,
    )
