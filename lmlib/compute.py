"""Settings of computation. They do not change the model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

EVERYTHING = ("everything",)  # value of `Compute.saved`: all activations that the layers name


@dataclasses.dataclass(frozen=True)
class Compute:
    """Settings of computation, which may change when a run is resumed.

    Args:
      dtype: dtype of activations and gathered weights, such as "bfloat16" or "float32".
      attention: an attention kernel of `lmlib.models.attend`; "auto" selects the best one.
      quantized: precision of products in 8 bits, by kind of layer ("projections", "mlp"): "int8",
        "float8" or "mxfp8", as in `lmlib.models.matrices.quantized`.
      context_method: method of exchanging keys if the mesh axis `context` splits rows: "gather" or
        "ring" (`lmlib.models.attend.context_parallel`); "auto" gathers small keys.
      dispatch: method of sending tokens to the devices of their experts: "gather" or "exchange"
        (`lmlib.models.experts.rounds.DISPATCHES`); "auto" selects the one that sends less.
      expert_parts: parts of a device's rows (sequences), if their number divides; one part's tokens
        travel to their experts and back during the products of another.
      expert_room: rows that a device computes for its experts at a time, as a multiple of the
        number for even routing; additional rows are computed in further rounds.
      grouped: method of the experts' products (`lmlib.models.experts.grouped`), or "auto".
      saved: names (`lmlib.models.part.ActivationNames`) of activations that are saved for the
        backward pass, or `EVERYTHING`; the others are recomputed.
      offloaded: further activations, saved in the host's memory.
      pipeline_rows: rows of each device in a microbatch, if the mesh axis `stage` splits the
        layers; more rows make larger products, and a larger bubble.
      pipeline_rounds: times that a microbatch goes around the stages
        (`lmlib.models.pipeline.schedule`); more make a smaller bubble, and more communication.
      unroll: up to this many repetitions of a pattern of layers run without a loop.
      sequence_parallel: split the residual stream between blocks along its sequence over `tensor`
        (Korthikanti et al. 2022, arXiv:2205.05198).
      recurrent_chunk: tokens of a chunk of recurrent layers; a power of two, or the next one.
      loss_chunk: tokens whose logits a device holds at a time (`fused.split_into_chunks`).
      logits_dtype: dtype of the loss's logits; softmax is in float32 or wider.
    """

    dtype: str = "bfloat16"
    attention: str = "auto"
    quantized: Mapping[str, str] | None = None
    context_method: str = "auto"
    dispatch: str = "auto"
    expert_parts: int = 1
    expert_room: float = 1.25
    grouped: str = "auto"
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    pipeline_rows: int = 1
    pipeline_rounds: int = 1
    unroll: int = 1
    sequence_parallel: bool = False
    recurrent_chunk: int = 64
    loss_chunk: int | None = None
    logits_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("dtype", "logits_dtype"):
            if not is_floating(dtype := getattr(self, name)):
                raise ValueError(f"{name} must be a floating type like 'bfloat16', got {dtype!r}")
        counts = "unroll", "pipeline_rows", "pipeline_rounds", "recurrent_chunk"
        for name in (*counts, "expert_room", "expert_parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"loss_chunk must be at least 1, or None, got {self.loss_chunk}")
        names = [*self.saved, *self.offloaded]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is named twice in saved and offloaded")

    def precision(self, kind: str) -> str | None:
        """The precision of products of this kind of layer; `None` if they are not quantized."""
        return (self.quantized or {}).get(kind)

    def kept(self, names: Sequence[str]) -> tuple[str, ...]:
        """The activations among `names` that are saved on the device."""
        everything = tuple(name for name in names if name not in self.offloaded)
        return everything if self.saved == EVERYTHING else self.saved

    @property
    def residual(self) -> str:
        """The axes of the residual stream between blocks; they determine its layout."""
        return "batch seq_parallel embed" if self.sequence_parallel else "batch seq embed"


def is_floating(dtype: Any) -> bool:
    """True for a floating type, or the name of one."""
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
