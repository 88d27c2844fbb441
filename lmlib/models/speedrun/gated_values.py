"""Value embeddings with a gate for each head and token.

Shapes: B batch, T sequence (keys), E embed, K kv_heads, D head_dim, R columns of a row.
"""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.value_embedding import ValueEmbedding
from lmlib.models.weights import fan_in, fill, weight
from lmlib.parallel.layout import reshard

ATTENTION_INPUT = "attention_input"  # the key of what a layer's attention reads


class SharingAttention(Attention):
    """Attention that gives its input to its value embedding, as `ATTENTION_INPUT`."""

    rows_may_be_split = True

    def __init__(self, *sizes: Any, **attention: Any):
        super().__init__(*sizes, **attention)

    def _projected(self, x_BSE: Array, context: ForwardContext) -> tuple[Array, Array, Array]:
        return super()._projected(x_BSE, context.sharing({ATTENTION_INPUT: x_BSE}))


class GatedValueEmbedding(ValueEmbedding):
    """v + peak · sigmoid(gate · x[:n] + row_gate · row[:r]) · row, row = table[token].

    x is the input of attention. Sources: nanochat, which has n = 12, r = 0 and peak 3;
    modded-nanogpt, records 55 and 70, with n = r = 6 and peak 2. Gates start at peak / 2.
    """

    rows_may_be_split = True

    gate: Float[Array, "gate_input kv_heads"] = weight(
        fan_in("gate_input", scale=0.0), rules={"gate_input": None}, decays=False
    )
    row_gate: Float[Array, "row_input kv_heads"] | None = weight(
        fan_in("row_input", scale=0.0), rules={"row_input": None}, decays=False
    )
    peak: float = eqx.field(static=True)

    def __init__(
        self,
        vocab: int,
        kv_heads: int,
        head_dim: int,
        gate_input: int = 12,
        row_input: int = 0,
        peak: float = 3.0,
        *,
        key: PRNGKeyArray,
        **others: Any,
    ):
        self.kv_heads, self.peak = kv_heads, peak
        absent = ["share"] if row_input else ["share", "row_gate"]
        sizes = {"gate_input": gate_input, "row_input": row_input, "kv_heads": kv_heads}
        fill(self, key, absent, vocab=vocab, looked_up=kv_heads * head_dim, **sizes)

    def __call__(
        self, v_BTKD: Float[Array, "b t kv_heads head_dim"], context: ForwardContext
    ) -> Float[Array, "b t kv_heads head_dim"]:
        """Returns the values plus the gated rows of their tokens."""
        x_BTE, rows_BTKD = context.shared[ATTENTION_INPUT], self.rows(v_BTKD, context)
        logit_BTK = matmul("btg,gk->btk", x_BTE[..., : self.gate.shape[0]], self.gate)
        if self.row_gate is not None:
            first_BTD = reshard(rows_BTKD, ("batch", "seq", None, None))[:, :, 0]
            first_BTR = first_BTD[..., : self.row_gate.shape[0]]
            logit_BTK += matmul("btr,rk->btk", first_BTR, self.row_gate)
        return v_BTKD + self.peak * jax.nn.sigmoid(logit_BTK)[..., None] * rows_BTKD
