"""The interface of attention kernels.

Shapes: C devices along `context`, S sequence of a device (queries), B batch, H heads.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# Kernels by name, imported on first use: a fused one needs its accelerator's Pallas.
_MODULES = {
    "cudnn": "lmlib.models.attend.fused.cudnn",
    "triton": "lmlib.models.attend.fused.triton",
    "splash": "lmlib.models.attend.fused.splash",
    "blockwise": "lmlib.models.attend.blockwise",
    "plain": "lmlib.models.attend.plain",
}
IMPLEMENTATIONS = tuple(_MODULES)
# Methods of exchanging keys on split rows: see `lmlib.models.attend.context_parallel`.
CONTEXT_METHODS = ("gather", "ring")


class Options(NamedTuple):
    """Arguments of every kernel; see `lmlib.models.attend.attend`."""

    window: int | None
    scale: float
    soft_cap: float | None

    @classmethod
    def of(
        cls, window: int | None, scale: float | None, soft_cap: float | None, head_dim: int
    ) -> "Options":
        """Makes options; a scale of `None` becomes head_dim^-1/2."""
        return cls(window, head_dim**-0.5 if scale is None else scale, soft_cap)

    def scores(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """The arguments of softmax, before the mask, from the products of queries and keys."""
        scaled = products * self.scale
        return scaled if self.soft_cap is None else self.soft_cap * jnp.tanh(scaled / self.soft_cap)

    def slope(self, scores: Float[Array, "..."]) -> Float[Array, "..."] | float:
        """The derivative of `scores` with respect to the products."""
        if self.soft_cap is None:
            return self.scale
        return self.scale * (1 - jnp.square(scores / self.soft_cap))


class Shapes(NamedTuple):
    """The sizes and dtype of a call; `head_dim` of queries and keys, and by default of values."""

    sequence_length: int
    head_dim: int
    dtype: DTypeLike
    soft_cap: float | None = None
    value_dim: int | None = None
    sinks: bool = False


class Places(NamedTuple):
    """The position in its row of each query of each device, known before the program runs.

    `device` is the index of this device; at least `piece` of its tokens are adjacent in the row.
    """

    devices_CS: Int[np.ndarray, "c s"]
    device: Array | int
    piece: int

    @property
    def own_S(self) -> Int[Array, "s"]:
        """The positions of this device's queries."""
        return jnp.asarray(self.devices_CS)[self.device]


def whole_row(length: int) -> Places:
    """The positions on a device that has every token of a row."""
    return Places(np.arange(length, dtype=np.int32)[None], 0, length)


class Kernel(NamedTuple):
    """An implementation of attention on one device.

    `attend(q_BSHD, k_BTKD, v_BTKV, segments_BS, segments_BT, places, options)` returns the mixed
    values [B, S, H, V], and the logarithm of each query's normaliser [B, S, H] or `None`. Keys
    cover the whole row, in its order.
    """

    attend: Callable[..., tuple[Array, Array | None]]
    problem: Callable[[Shapes], str | None] = lambda shapes: None  # the reason against them
    has_normaliser: bool = True  # True if it returns the normaliser, which sinks need
    takes_pieces: bool = False  # True if queries may be a part of the row


def with_sinks(
    mixed_BSHV: Float[Array, "b s heads value_dim"],
    log_normaliser_BSH: Float[Array, "b s heads"],
    sinks_H: Float[Array, "heads"],
) -> Float[Array, "b s heads value_dim"]:
    """Adds sinks: learned logits without a value (arXiv:2508.10925, §2.2)."""
    left_BSH = left_by_sinks(log_normaliser_BSH, sinks_H)
    return (mixed_BSHV * left_BSH[..., None]).astype(mixed_BSHV.dtype)


def left_by_sinks(
    log_normaliser: Float[Array, "..."], sinks: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The sum of the weights that a sink s leaves of a normaliser exp(n): sigmoid(n - s)."""
    wide = jnp.promote_types(sinks.dtype, jnp.float32)
    return jax.nn.sigmoid(log_normaliser - sinks.astype(wide))


def kernel_of(implementation: str) -> Kernel:
    """Returns the kernel with this name, one of `IMPLEMENTATIONS`."""
    kernel: Kernel = importlib.import_module(_MODULES[implementation]).KERNEL
    return kernel
