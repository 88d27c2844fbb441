"""How a model is computed. Nothing here changes what the model is."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

EVERYTHING = ("everything",)  # of `Compute.saved`: all activations that the layers name


@dataclasses.dataclass(frozen=True)
class Compute:
    """Free to change when a run is resumed.

    Args:
      dtype: of activations and gathered weights, for example "bfloat16" or "float32".
      attention: which kernel, of those in `lmlib.models.attend`; "auto" takes the best there is.
      quantized: products in 8 bits, by kind of layer ("projections", "mlp"): "int8" or "float8", as
        in `lmlib.models.matrices.quantized`.
      context: how keys come to queries where the axis `context` of the mesh splits rows: "gather"
        or "ring", as in `lmlib.models.attend.context_parallel`; "auto" takes "gather" while keys
        are few.
      dispatch: how tokens come to the devices of their experts: "gather" or "exchange", as in
        `lmlib.models.experts.rounds.DISPATCHES`; "auto" takes what sends less.
      expert_room: rows that a device has room for to compute its experts at a time, as a multiple
        of what even routing brings; if more come they are computed in further rounds.
      saved: activations kept for the backward pass, by the names that layers give them
        (`lmlib.models.part.Names`), or `EVERYTHING`; it computes the others again.
      offloaded: more of them, kept in the host's memory.
      pipeline_rows: rows that each device brings to a microbatch, where `stage` of the mesh
        splits the layers; more of them make larger products, and a larger bubble.
      pipeline_rounds: how often a microbatch goes around the stages, as in
        `lmlib.models.pipeline.schedule`; more of them make a smaller bubble, and more to send.
      unroll: repetitions of a pattern of layers in each turn of the scan over layers; more than
        there are means no loop.
      sequence_parallel: split the residual stream between blocks along its sequence over `tensor`
        (Korthikanti et al. 2022, arXiv:2205.05198).
      loss_chunk: tokens whose logits a device holds at a time; `None`: see
        `lmlib.losses.fused.chunks`.
      logits_dtype: of the logits that the loss is computed from; softmax is in float32 at least.

    Raises:
      ValueError: if a count is not positive, a dtype is no floating type, or a name is given twice.
    """

    dtype: str = "bfloat16"
    attention: str = "auto"
    quantized: Mapping[str, str] | None = None
    context: str = "auto"
    dispatch: str = "auto"
    expert_room: float = 1.25
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    pipeline_rows: int = 1
    pipeline_rounds: int = 1
    unroll: int = 1
    sequence_parallel: bool = False
    loss_chunk: int | None = None
    logits_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("dtype", "logits_dtype"):
            if not is_floating(dtype := getattr(self, name)):
                raise ValueError(f"{name} must be a floating type like 'bfloat16', got {dtype!r}")
        for name in ("unroll", "pipeline_rows", "pipeline_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"loss_chunk must be at least 1, or None, got {self.loss_chunk}")
        if self.expert_room < 1:
            raise ValueError(f"expert_room must be at least 1, got {self.expert_room}")
        names = [*self.saved, *self.offloaded]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is named twice in saved and offloaded")

    def precision(self, kind: str) -> str | None:
        """Of the products of layers of this kind; `None` where they are not quantized."""
        return (self.quantized or {}).get(kind)

    def kept(self, names: Sequence[str]) -> tuple[str, ...]:
        """Which of the activations that layers name the device keeps."""
        everything = tuple(name for name in names if name not in self.offloaded)
        return everything if self.saved == EVERYTHING else self.saved

    @property
    def residual(self) -> str:
        """The axes of the residual stream between blocks, which say how it lies on the mesh."""
        return "batch seq_parallel embed" if self.sequence_parallel else "batch seq embed"


def is_floating(dtype: Any) -> bool:
    """True for a floating type, or the name of one."""
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
