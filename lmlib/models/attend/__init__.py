"""Causal attention kept within documents, by the best implementation for the devices at hand.

    implementation  where                what
    cudnn           NVIDIA GPUs          cuDNN's fused attention
    splash          TPUs                 Pallas's splash attention
    blockwise       anywhere             tiles in plain JAX; no S × S matrix
    plain           anywhere             the definition; an S × S matrix for each head

"auto" takes cudnn on NVIDIA GPUs and splash on TPUs where they can compute the shapes, else
blockwise. All of them compute the same: a test holds each against the definition in float64.
"""

import functools

from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from lmlib.models.attend import blockwise, cudnn, plain, splash
from lmlib.models.attend.options import Options
from lmlib.parallel.collectives import on_each_device, platform
from lmlib.parallel.layout import partition

# Each has `attend`, and `problem` if there are sizes that it cannot compute.
IMPLEMENTATIONS = {"cudnn": cudnn, "splash": splash, "blockwise": blockwise, "plain": plain}


def attend(
    q_BSHD: Float[Array, "b s heads head_dim"],
    k_BTKD: Float[Array, "b s kv_heads head_dim"],
    v_BTKD: Float[Array, "b s kv_heads head_dim"],
    segment_ids_BS: Int32[Array, "b s"],
    implementation: str = "auto",
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "b s heads head_dim"]:
    """softmax(scale · q kᵀ) v, each position over those of its own segment up to itself.

    Args:
      segment_ids_BS: which document of its row each position belongs to.
      implementation: "auto", or one of `IMPLEMENTATIONS`.
      window: a position sees itself and the `window` - 1 before it; `None`: all before it.
      scale: `None`: D^-1/2.
      soft_cap: c, where a score s becomes c · tanh(s / c) before the mask (Gemma 2,
        arXiv:2408.00118, §2); `None`: s stays.

    Softmax is in float32 at least; the result has v's dtype. `tensor` splits the heads; each device
    attends with its own, and nothing is sent.

    Raises:
      ValueError: if the implementation asked for cannot compute these shapes.
    """
    if implementation == "auto":
        implementation = chosen(q_BSHD, soft_cap)
    options = Options.of(window, scale, soft_cap, q_BSHD.shape[-1])
    heads, kv_heads = (
        partition("batch seq heads head_dim"),
        partition("batch seq kv_heads head_dim"),
    )
    mixed_BSHD = on_each_device(
        functools.partial(IMPLEMENTATIONS[implementation].attend, options=options),
        inputs=(heads, kv_heads, kv_heads, partition("batch seq")),
        outputs=heads,
        tracked=False,
    )(q_BSHD, k_BTKD, v_BTKD, segment_ids_BS)
    return checkpoint_name(mixed_BSHD, "attention")


def attention_weights(
    q_BSHD: Float[Array, "b s heads head_dim"],
    k_BTKD: Float[Array, "b s kv_heads head_dim"],
    segment_ids_BS: Int32[Array, "b s"],
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "b heads s t"]:
    """What `attend` multiplies the values by: of each query (s) how much it takes from each key
    (t); each row adds up to 1. float32 at least. The arguments are those of `attend`."""
    options = Options.of(window, scale, soft_cap, q_BSHD.shape[-1])
    return on_each_device(
        functools.partial(plain.weights, options=options),
        inputs=(
            partition("batch seq heads head_dim"),
            partition("batch seq kv_heads head_dim"),
            partition("batch seq"),
        ),
        outputs=partition(("batch", "heads", None, None)),
        tracked=False,
    )(q_BSHD, k_BTKD, segment_ids_BS)


def check_attention(
    implementation: str,
    sequence_length: int,
    head_dim: int,
    dtype: DTypeLike,
    soft_cap: float | None = None,
) -> None:
    """Raises ValueError if there is no such implementation, or it cannot compute these sizes."""
    known = ("auto", *IMPLEMENTATIONS)
    if implementation not in known:
        raise ValueError(f"attention must be one of {', '.join(known)}, got {implementation!r}")
    reason = problem(implementation, sequence_length, head_dim, dtype, soft_cap)
    if reason is not None:
        raise ValueError(f"attention={implementation!r}: {reason}; use 'blockwise' or 'auto'")


def problem(
    implementation: str,
    sequence_length: int,
    head_dim: int,
    dtype: DTypeLike,
    soft_cap: float | None = None,
) -> str | None:
    """Why an implementation cannot compute attention of these sizes, if it cannot."""
    limits = getattr(IMPLEMENTATIONS.get(implementation), "problem", None)
    return None if limits is None else limits(sequence_length, head_dim, dtype, soft_cap)


def chosen(q_BSHD: Float[Array, "b s heads head_dim"], soft_cap: float | None = None) -> str:
    """What "auto" takes for such queries on the devices of the mesh that is set."""
    _, S, _, D = q_BSHD.shape
    best = {"tpu": "splash", "cuda": "cudnn"}.get(platform(), "blockwise")
    return best if problem(best, S, D, q_BSHD.dtype, soft_cap) is None else "blockwise"
