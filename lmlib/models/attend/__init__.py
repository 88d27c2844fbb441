"""Causal attention within documents, by the best implementation for the devices.

    implementation  devices              description
    triton          NVIDIA GPUs          a fused kernel that skips other documents
    cudnn           NVIDIA GPUs          cuDNN's fused attention, the fastest for rows of one
                                         document; it computes other rows whole, with a mask
    splash          TPUs                 Pallas's splash attention
    blockwise       any                  tiles in plain JAX; no S × S matrix
    plain           any                  the definition; an S × S matrix for each head

"auto" selects triton on NVIDIA GPUs, cudnn for rows that are known to be one document each, and
splash on TPUs, if they support the shapes. Otherwise it selects blockwise. All of them compute the
same: a test compares each with the definition in float64. If `context` splits rows, triton and
splash compute them with gathered keys, and blockwise in two ways
(`lmlib.models.attend.context_parallel`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.kernel import (
    IMPLEMENTATIONS,
    WAYS,
    Kernel,
    Options,
    kernel_of,
    whole_row,
    with_sinks,
)
from lmlib.parallel.collectives import devices_along, on_each_device, platform
from lmlib.parallel.layout import COMPUTE, along, partition, reshard, whole_place

# The choices of "auto" for each platform, the best first; blockwise if none fits.
_BEST = {"cuda": ("triton",), "tpu": ("splash",)}
_BEST_OF_WHOLE_ROWS = _BEST | {"cuda": ("cudnn", "triton")}


def attend(
    q_BSHD: Float[Array, "b s heads head_dim"],
    k_BTKD: Float[Array, "b s kv_heads head_dim"],
    v_BTKV: Float[Array, "b s kv_heads value_dim"],
    segment_ids_BS: Int32[Array, "b s"] | None,
    implementation: str = "auto",
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks_H: Float[Array, "heads"] | None = None,
    order: str = "plain",
    way: str = "auto",
) -> Float[Array, "b s heads value_dim"]:
    """softmax(scale · q kᵀ) v, each position over the earlier ones of its segment and itself.

    Softmax is in float32 or wider; the result has v's dtype. `tensor` splits the heads; each device
    attends with its own. Nothing is sent, except along `context`.

    Args:
      segment_ids_BS: the document that each position belongs to, numbered within its row; the
        tokens of a document are adjacent. `None`: each row is one document.
      implementation: "auto", or one of `IMPLEMENTATIONS`.
      window: a position attends to itself and the `window` - 1 before it; `None`: all before it.
      scale: factor of the products; `None`: D^-1/2.
      soft_cap: c, if scores s become c · tanh(s / c) before the mask (Gemma 2, arXiv:2408.00118,
        §2); `None` leaves them as they are.
      sinks_H: the sink of each head, see `with_sinks`; optional.
      order: order of a row's tokens along `context`; see `lmlib.row_order`.
      way: "auto", or one of `WAYS`, if `context` splits rows.

    Raises:
      ValueError: if the chosen implementation does not support these shapes.
    """
    options = Options.of(window, scale, soft_cap, q_BSHD.shape[-1])
    heads, kv_heads = "batch seq heads head_dim", "batch seq kv_heads head_dim"

    def computed(function: Callable[..., Any], *outputs: str) -> Any:
        results = on_each_device(
            functools.partial(function, options=options),
            inputs=tuple(map(_every_row, (heads, kv_heads, kv_heads, "batch seq"))),
            outputs=tuple(map(_every_row, outputs)) if len(outputs) > 1 else _every_row(*outputs),
            tracked=False,
        )(q_BSHD, k_BTKD, v_BTKV, segment_ids_BS)
        return jax.tree.map(reshard, results, outputs if len(outputs) > 1 else outputs[0])

    if implementation == "auto":
        sizes = soft_cap, v_BTKV.shape[-1], sinks_H is not None
        whole_rows = segment_ids_BS is None
        implementation = chosen(q_BSHD, *sizes, order=order, way=way, whole_rows=whole_rows)
    if segment_ids_BS is None and implementation != "cudnn":
        segment_ids_BS = one_document(q_BSHD)
    kernel, sinks = kernel_of(implementation), sinks_H is not None
    if sinks and not kernel.has_normaliser:
        raise ValueError(f"{implementation} has no sinks; use attention='blockwise' or 'auto'")
    if _is_split():
        from lmlib.models.attend import context_parallel  # only split rows need it

        heads_of = q_BSHD.shape[2], k_BTKD.shape[2]
        function = context_parallel.function_of(implementation, *heads_of, order, way, sinks)
    else:
        function = functools.partial(_of_whole_rows, kernel)
    if sinks_H is None:
        mixed = lambda *given, options: function(*given, options=options)[0]  # noqa: E731
        return checkpoint_name(computed(mixed, heads), "attention")
    mixed_BSHV, log_normaliser_BSH = computed(function, heads, "batch seq heads")
    return checkpoint_name(with_sinks(mixed_BSHV, log_normaliser_BSH, sinks_H), "attention")


def _of_whole_rows(
    kernel: Kernel, q_BSHD: Array, k_BSKD: Array, v_BSKV: Array, segments_BS: Any, options: Options
) -> tuple[Array, Array | None]:
    places = whole_row(q_BSHD.shape[1])
    return kernel.attend(q_BSHD, k_BSKD, v_BSKV, segments_BS, segments_BS, places, options)


def _is_split() -> bool:
    """True if several devices of the current mesh share each row."""
    return devices_along(along("seq")) > 1


def _every_row(axes: str) -> PartitionSpec:
    """The layout of `axes`, including mesh axes of size 1 that split batch and rows.

    Without these, JAX would sum gradients over them.
    """
    _, _, *others = partition(axes)
    return PartitionSpec(whole_place(COMPUTE["batch"]), whole_place(COMPUTE["seq"]), *others)


def one_document(q_BSHD: Array) -> Int32[Array, "b s"]:
    """Segment ids of rows that are one document each."""
    return reshard(jnp.zeros(q_BSHD.shape[:2], jnp.int32), "batch seq")


def check_attention(
    implementation: str,
    sequence_length: int,
    head_dim: int,
    dtype: DTypeLike,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    sinks: bool = False,
    way: str = "auto",
) -> None:
    """Raises ValueError for an unknown implementation or way, or sizes that it does not support.

    See `problem`.
    """
    if way not in (ways := ("auto", *WAYS)):
        raise ValueError(f"context must be one of {', '.join(ways)}, got {way!r}")
    known = ("auto", *IMPLEMENTATIONS)
    if implementation not in known:
        raise ValueError(f"attention must be one of {', '.join(known)}, got {implementation!r}")
    reason = problem(implementation, sequence_length, head_dim, dtype, soft_cap, value_dim, sinks)
    if reason is not None:
        raise ValueError(f"attention={implementation!r}: {reason}; use 'blockwise' or 'auto'")


def problem(
    implementation: str,
    sequence_length: int,
    head_dim: int,
    dtype: DTypeLike,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    sinks: bool = False,
) -> str | None:
    """The reason why an implementation does not support these sizes; `None` if it does.

    Args:
      head_dim: size of queries and keys.
      value_dim: size of values; `None`: `head_dim`.
      sinks: True if there are sinks.
    """
    if implementation == "auto":
        return None
    kernel = kernel_of(implementation)
    if sinks and not kernel.has_normaliser:
        return f"{implementation} has no sinks"
    sizes = dict.fromkeys((head_dim, value_dim or head_dim))
    reasons = (kernel.problem(sequence_length, size, dtype, soft_cap) for size in sizes)
    return next((reason for reason in reasons if reason is not None), None)


def chosen(
    q_BSHD: Float[Array, "b s heads head_dim"],
    soft_cap: float | None = None,
    value_dim: int | None = None,
    sinks: bool = False,
    order: str = "plain",
    way: str = "auto",
    whole_rows: bool = False,
) -> str:
    """The choice of "auto" for these queries on the devices of the current mesh."""
    _, length, _, D = q_BSHD.shape
    names: tuple[str, ...] = (_BEST_OF_WHOLE_ROWS if whole_rows else _BEST).get(platform(), ())
    if names and _is_split():
        from lmlib.models.attend import context_parallel

        length = context_parallel.length_of_piece(length, devices_along(along("seq")), order)
        names = tuple(
            name for name in names if context_parallel.problem(kernel_of(name), way, sinks) is None
        )
    for name in names:
        if problem(name, length, D, q_BSHD.dtype, soft_cap, value_dim, sinks) is None:
            return name
    return "blockwise"
