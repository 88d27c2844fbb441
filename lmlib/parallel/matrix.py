"""Weights that consist of several arrays: in 8 bits with scales, or with an adapter.

Code that multiplies by a weight calls `lmlib.models.matmul.matmul`, which accepts arrays and
matrices. Code that needs the array calls `dense`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray


class Matrix(eqx.Module):
    """Base class of a weight that consists of several arrays, declared like other weights."""

    @property
    def is_random(self) -> bool:
        """True if a training step needs a key for it."""
        return False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense array."""

    @abstractmethod
    def dense(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
        """The matrix as one array of `dtype`, or a wider one, in the layout of its arrays."""

    @abstractmethod
    def einsum(
        self, equation: str, x: Array, precision: str | None, out_sharding: PartitionSpec | None
    ) -> Float[Array, "..."]:
        """The product of `x` and this matrix; see `lmlib.models.matmul.matmul`."""

    @abstractmethod
    def apply(self, multiply: Callable[[Array, Array], Array], x: Array) -> Array:
        """The product of `x` and this matrix, computed with `multiply(x, array)`."""

    def gathered(self, dtype: DTypeLike, after: Array | None) -> Any:
        """Returns the weight in use, after `gather` has moved this matrix's arrays; see there."""
        return self

    def with_key(self, key: PRNGKeyArray) -> "Matrix":
        """Returns the matrix with the key of its random numbers in a training step."""
        return self

    def gets_gradient(self) -> Any:
        """True, for each array of this matrix, if it may have a gradient."""
        return jax.tree.map(lambda _: True, self)

    def counts(self) -> Any:
        """Weights that each array of this matrix stands for; none for scales."""
        return jax.tree.map(lambda array: math.prod(array.shape), self)


def is_matrix(node: Any) -> bool:
    return isinstance(node, Matrix)


def dense(weight: Array | Matrix) -> Array:
    """Returns the weight as one array."""
    return weight.dense() if isinstance(weight, Matrix) else weight


def counts(tree: Any) -> Any:
    """Returns the number of weights in each array of `tree`; see `Matrix.counts`."""

    def visit(node: Any) -> Any:
        return node.counts() if isinstance(node, Matrix) else math.prod(node.shape)

    return jax.tree.map(visit, tree, is_leaf=is_matrix)


def number_of_weights(tree: Any) -> int:
    """Returns the sum of `counts`."""
    return sum(jax.tree.leaves(counts(tree)))


def is_random(tree: Any) -> bool:
    """True if a matrix in `tree` needs a key in training."""
    nodes = jax.tree.leaves(tree, is_leaf=is_matrix)
    return any(isinstance(node, Matrix) and node.is_random for node in nodes)


def with_keys(tree: Any, key_of: Callable[[str], PRNGKeyArray]) -> Any:
    """Puts a key, `key_of` its path, in each random matrix of `tree`."""

    def visit(keys: Any, node: Any) -> Any:
        if not (isinstance(node, Matrix) and node.is_random):
            return node
        return node.with_key(key_of(jax.tree_util.keystr(keys, simple=True, separator=".")))

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_matrix)
