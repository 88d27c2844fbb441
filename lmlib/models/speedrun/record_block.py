"""Layers of modded-nanogpt's records: scaled branches, and gated shares of earlier activations.

Shapes: B batch, S sequence, T sequence (keys), E embed, K kv_heads, D head_dim.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.block import BlockBase
from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import ActivationNames, AuxOutputs, Norm, Part, merge_names
from lmlib.models.speedrun.gated_values import GatedValueEmbedding
from lmlib.models.speedrun.token_gates import of_residual
from lmlib.models.weights import Constant, fill, normal, weight
from lmlib.parallel.layout import reshard


class Share(NamedTuple):
    """gate · activations, both by their keys in `Context.shared`."""

    gate: Hashable
    activations: Hashable


class RecordBlock(BlockBase):
    """x ← a x + b attention(norm(x)) + shares, then x ← c x + d mlp(norm(x)).

    a and c start at √1.1, b and d at 1 (modded-nanogpt, record 45).

    Args:
      shares: added after attention.
      attended: the key of the residual stream that attention reads instead of x; optional.
      scales: the key of a, b, c, d for each token; "learned" for a number each; `None` for 1.
    """

    rows_may_be_split = True

    attention_norm: Norm | None
    attention: Part
    mlp_norm: Norm | None
    mlp: Part
    shares: tuple[Share, ...] = eqx.field(static=True)
    attended_stream: Hashable = eqx.field(static=True)
    scales: Hashable = eqx.field(static=True)
    a: Float[Array, ""] | None = weight(Constant(1.1**0.5), dtype="float32", learning_rate=5.0)
    b: Float[Array, ""] | None = weight(Constant(1.0), dtype="float32")
    c: Float[Array, ""] | None = weight(Constant(1.1**0.5), dtype="float32", learning_rate=5.0)
    d: Float[Array, ""] | None = weight(Constant(1.0), dtype="float32")

    def __init__(
        self,
        attention: Part,
        mlp: Part,
        norm: Norm,
        shares: Sequence[Share] = (),
        attended: Hashable = None,
        scales: Hashable = "learned",
        *,
        key: PRNGKeyArray,
    ):
        self.attention, self.mlp, self.attention_norm, self.mlp_norm = attention, mlp, norm, norm
        self.shares, self.attended_stream, self.scales = tuple(shares), attended, scales
        absent = () if scales == "learned" else ("a", "b", "c", "d")
        without_attention = isinstance(attention, Skip)
        fill(self, key, ("a", "b") if without_attention and not absent else absent)

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], AuxOutputs, Any]:
        """A layer's call; see `Part`."""
        of_token: tuple[Any, ...] = (self.a, self.b, self.c, self.d)
        if self.scales not in ("learned", None):
            scales = of_residual(context.shared[self.scales], context)
            of_token = tuple(scales[..., i : i + 1] for i in range(4))
        a, b, c, d = of_token
        read = x_BSE if self.attended_stream is None else context.shared[self.attended_stream]
        h_BSE, cache = self.attended(read, context, cache)
        h_BSE = checkpoint_name(h_BSE, "attention_output")  # the gradient of b needs it
        total = _times(a, x_BSE) + _times(b, h_BSE)
        for share in self.shares:
            gate = of_residual(context.shared[share.gate], context)
            total += _times(gate, context.shared[share.activations])
        x_BSE = checkpoint_name(total.astype(x_BSE.dtype), "attention_residual")
        h_BSE, aux = self.fed_forward(x_BSE, context)
        h_BSE = checkpoint_name(h_BSE, "mlp_output")
        return (_times(c, x_BSE) + _times(d, h_BSE)).astype(x_BSE.dtype), aux, cache

    @property
    def names(self) -> ActivationNames:
        between = ("attention_output", "attention_residual", "mlp_input")
        own = map(ActivationNames, (("attention_input",), between, ("mlp_output",)))
        return merge_names(next(own), self.attention.names, next(own), self.mlp.names, *own)

    @property
    def reads(self) -> tuple[Hashable, ...]:
        own = [each for share in self.shares for each in share]
        own += [] if self.attended_stream is None else [self.attended_stream]
        own += [] if self.scales in ("learned", None) else [self.scales]
        return (*own, *super().reads)


class Skip(Part):
    """sigmoid(share) · gate · earlier activations, in place of attention.

    The share starts at -1.5. Source: modded-nanogpt, records 45 and 55.
    """

    rows_may_be_split = True

    earlier: Share = eqx.field(static=True)
    share: Float[Array, ""] = weight(Constant(-1.5), dtype="float32", learning_rate=5.0)

    def __init__(self, earlier: Share, *, key: PRNGKeyArray):
        self.earlier = earlier
        fill(self, key)

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], Any]:
        """A mixer's call, whose input does not matter."""
        gate = of_residual(context.shared[self.earlier.gate], context)
        y_BSE = _times(jax.nn.sigmoid(self.share) * gate, context.shared[self.earlier.activations])
        return y_BSE.astype(x_BSE.dtype), cache

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return (*self.earlier,)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        return ()


class RecordValues(GatedValueEmbedding):
    """A `GatedValueEmbedding` with 75 times the learning rate for its table."""

    rows_may_be_split = True

    table: Float[Array, "vocab looked_up"] = weight(
        normal(0.01), rules={"vocab": None}, dtype="float32", learning_rate=75.0
    )


class SharedValues(RecordValues):
    """v + gate · table[token] + activations, with one gate for each half of the heads.

    Source: modded-nanogpt, record 81, in the last layer.

    Args:
      vocab, kv_heads, head_dim: as in `ValueEmbedding`.
      gate, activations: keys of `Context.shared`; activations are split into heads.
    """

    rows_may_be_split = True

    added: Share = eqx.field(static=True)

    def __init__(
        self,
        vocab: int,
        kv_heads: int,
        head_dim: int,
        gate: Hashable,
        activations: Hashable,
        *,
        key: PRNGKeyArray,
        **others: Any,
    ):
        self.kv_heads, self.peak, self.added = kv_heads, 1.0, Share(gate, activations)
        absent = ["share", "gate", "row_gate"]
        fill(self, key, absent, vocab=vocab, looked_up=kv_heads * head_dim)

    def __call__(
        self, v_BTKD: Float[Array, "b t kv_heads head_dim"], context: ForwardContext
    ) -> Float[Array, "b t kv_heads head_dim"]:
        gate_BTG = reshard(context.shared[self.added.gate], ("batch", "seq", None))
        gate_BTK = jnp.repeat(gate_BTG, v_BTKD.shape[2] // gate_BTG.shape[2], axis=2)
        gate_BTK1 = reshard(gate_BTK, "batch seq kv_heads")[..., None]
        x_BTE = reshard(context.shared[self.added.activations], ("batch", "seq", None))
        x_BTKD = reshard(x_BTE.reshape(v_BTKD.shape), "batch seq kv_heads head_dim")
        return v_BTKD + gate_BTK1 * self.rows(v_BTKD, context) + x_BTKD

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return (*self.added, *super().reads)


def _times(scale: Array | None, x_BSE: Array) -> Array:
    """The product in float32 or wider: a scale near 1 changes slowly."""
    wide_BSE = x_BSE.astype(jnp.promote_types(x_BSE.dtype, jnp.float32))
    return wide_BSE if scale is None else scale * wide_BSE
