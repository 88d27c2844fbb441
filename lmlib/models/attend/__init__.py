"""Causal attention within documents, by the best implementation for the devices.

    implementation  devices      description
    triton          NVIDIA GPUs  a fused kernel that skips other documents
    cudnn           NVIDIA GPUs  cuDNN's kernel, the fastest for rows of one document
    splash          TPUs         Pallas's splash attention
    blockwise       any          tiles in plain JAX; no S × S matrix
    plain           any          the definition; an S × S matrix for each head

"auto" selects triton or, for rows that are known to be one document each, cudnn on NVIDIA GPUs, and
splash on TPUs, if they support the shapes, else blockwise. All compute the same.
"""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.kernel import (
    CONTEXT_METHODS,
    IMPLEMENTATIONS,
    Options,
    Shapes,
    kernel_of,
    whole_row,
    with_sinks,
)
from lmlib.parallel.collectives import devices_along, platform, shard_map
from lmlib.parallel.layout import COMPUTE, mesh_axes_for, partition, reshard, whole_place

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
    context_method: str = "auto",
) -> Float[Array, "b s heads value_dim"]:
    """softmax(scale · q kᵀ) v, each position over the earlier ones of its segment and itself.

    Softmax is in float32 or wider; the result has v's dtype. `tensor` splits the heads. Nothing is
    sent, except along `context`. Raises ValueError for shapes that are not supported.

    Args:
      segment_ids_BS: the document of each position; its tokens are adjacent. `None`: one per row.
      window: a position attends to itself and the `window` - 1 before it; `None`: all before it.
      scale: factor of the products; `None`: D^-1/2.
      soft_cap: c, if scores s become c · tanh(s / c) before the mask (arXiv:2408.00118, §2).
      sinks_H: the sink of each head, see `with_sinks`; optional.
      order, context_method: see `lmlib.row_order`, and `CONTEXT_METHODS`, or "auto".
    """
    options = Options.of(window, scale, soft_cap, q_BSHD.shape[-1])
    _, S, H, D = q_BSHD.shape
    shapes = Shapes(S, D, q_BSHD.dtype, soft_cap, v_BTKV.shape[-1], sinks_H is not None)
    if implementation == "auto":
        implementation = chosen(shapes, order, context_method, whole_rows=segment_ids_BS is None)
    elif (reason := _problem_here(implementation, shapes, order, context_method)) is not None:
        raise ValueError(f"{implementation}: {reason}; use attention='blockwise' or 'auto'")
    if segment_ids_BS is None and implementation != "cudnn":
        segment_ids_BS = one_document(q_BSHD)
    if _is_split():
        from lmlib.models.attend import context_parallel  # only split rows need it

        kv_heads = k_BTKD.shape[2]
        function = context_parallel.function_of(implementation, H, kv_heads, order, context_method)
    else:

        def function(q: Array, k: Array, v: Array, segments: Any, options: Options) -> Any:
            places = whole_row(q.shape[1])
            return kernel_of(implementation).attend(q, k, v, segments, segments, places, options)

    queries, keys = "batch seq heads head_dim", "batch seq kv_heads head_dim"
    outputs = (queries,) if sinks_H is None else (queries, "batch seq heads")
    results = shard_map(
        lambda *arrays: function(*arrays, options=options)[: len(outputs)],
        inputs=tuple(map(_every_row, (queries, keys, keys, "batch seq"))),
        outputs=tuple(map(_every_row, outputs)),
        tracked=False,
    )(q_BSHD, k_BTKD, v_BTKV, segment_ids_BS)
    mixed_BSHV, *log_normaliser_BSH = map(reshard, results, outputs)
    if sinks_H is not None:
        mixed_BSHV = with_sinks(mixed_BSHV, log_normaliser_BSH[0], sinks_H)
    return checkpoint_name(mixed_BSHV, "attention")


def _is_split() -> bool:
    """True if several devices of the current mesh share each row."""
    return devices_along(mesh_axes_for("seq")) > 1


def _every_row(axes: str) -> PartitionSpec:
    """The layout of `axes` with mesh axes of size 1 too, over which JAX would sum gradients."""
    _, _, *others = partition(axes)
    return PartitionSpec(whole_place(COMPUTE["batch"]), whole_place(COMPUTE["seq"]), *others)


def one_document(q_BSHD: Array) -> Int32[Array, "b s"]:
    """Segment ids of rows that are one document each."""
    return reshard(jnp.zeros(q_BSHD.shape[:2], jnp.int32), "batch seq")


def check_attention(implementation: str, shapes: Shapes, context_method: str = "auto") -> None:
    """Raises ValueError for an unknown name, or if `problem` has a reason."""
    named = {"context": context_method, "attention": implementation}
    for (name, value), known in zip(named.items(), (CONTEXT_METHODS, IMPLEMENTATIONS), strict=True):
        if value not in (values := ("auto", *known)):
            raise ValueError(f"{name} must be one of {', '.join(values)}, got {value!r}")
    if implementation != "auto" and (reason := problem(implementation, shapes)) is not None:
        raise ValueError(f"attention={implementation!r}: {reason}; use 'blockwise' or 'auto'")


def problem(implementation: str, shapes: Shapes) -> str | None:
    """The reason why an implementation does not support these shapes; `None` if it does."""
    kernel = kernel_of(implementation)
    if shapes.sinks and not kernel.has_normaliser:
        return f"{implementation} has no sinks"
    for size in (shapes.head_dim, shapes.value_dim or shapes.head_dim):
        if (reason := kernel.problem(shapes._replace(head_dim=size))) is not None:
            return reason
    return None


def _problem_here(name: str, shapes: Shapes, order: str, context_method: str) -> str | None:
    """`problem` on the devices of the current mesh."""
    if _is_split() and name != "blockwise":
        from lmlib.models.attend import context_parallel

        if (reason := context_parallel.problem(kernel_of(name), context_method)) is not None:
            return reason
        devices = devices_along(mesh_axes_for("seq"))
        piece = context_parallel.length_of_piece(shapes.sequence_length, devices, order)
        shapes = shapes._replace(sequence_length=piece)
    return problem(name, shapes)


def chosen(
    shapes: Shapes, order: str = "plain", context_method: str = "auto", whole_rows: bool = False
) -> str:
    """The choice of "auto" for these shapes on the devices of the current mesh."""
    names: tuple[str, ...] = (_BEST_OF_WHOLE_ROWS if whole_rows else _BEST).get(platform(), ())
    fits = (name for name in names if not _problem_here(name, shapes, order, context_method))
    return next(fits, "blockwise")
