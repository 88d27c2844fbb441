"""A model with learned positions, LayerNorm with biases and GELU (docs/your-own-architecture.md).

Shapes: B batch, S sequence, P position, E embed, V vocab.
"""

from jaxtyping import Array, Float

from lmlib.models.block import Block
from lmlib.models.model import Model, WeightGroup
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.embedding import embedded
from lmlib.models.parts.layer_norm import LayerNorm
from lmlib.models.parts.ungated_mlp import MLP, gelu
from lmlib.models.stack import Segment, Stack
from lmlib.models.weights import fold_in_name, initial_values, normal, weight
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import reshard, spec


class Positions(Part):
    table_PE: Float[Array, "position embed"] = weight(normal(0.01), rules={"position": None})

    def __call__(self, context):
        rows_BSE = self.table_PE.at[context.positions_BS].get(out_sharding=spec("batch seq embed"))
        return reshard(rows_BSE, context.compute.residual)


class Learned(Model):
    stack: Stack
    norm: LayerNorm
    positions: Positions
    tokens_VE: Float[Array, "vocab embed"] = weight(normal(0.02))

    def __init__(self, vocab, embed, layers, heads, positions, *, key):
        def block(key):
            attention = Attention(embed, heads, heads, embed // heads, bias=True, key=key)
            mlp = MLP(embed, 4 * embed, gelu, key=fold_in_name(key, "mlp"))
            norms = (LayerNorm(embed=embed, key=key) for _ in range(2))
            return Block(attention, mlp, *norms)

        sizes = {"vocab": vocab, "embed": embed, "position": positions}
        self.stack = Stack([Segment([block], layers)], key)
        self.norm = LayerNorm(embed=embed, key=key)
        self.positions = Positions(initial_values(Positions, "table_PE", key, **sizes))
        self.tokens_VE = initial_values(Learned, "tokens_VE", key, **sizes)

    def trunk(self, tokens_BS, context, cache=None):
        compute = context.compute
        x_BSE = embedded(self.tokens_VE, tokens_BS, compute.dtype, compute.residual)
        x_BSE += gather(self.positions, compute.dtype)(context)
        return self.stack(x_BSE, context, cache)

    def features(self, x_BSE, context):
        return gather(self.norm, context.compute.dtype)(x_BSE)

    def empty_cache(self, rows, length, dtype):
        return self.stack.empty_cache(rows, length, dtype)

    logit_cap = None
    vocab = property(lambda self: self.tokens_VE.shape[0])

    def unembedding_EV(self):
        return self.tokens_VE.T

    def flops_per_token(self, sequence_length, causal):
        head = 6.0 * self.tokens_VE.size
        return head + self.stack.flops_per_token(sequence_length, causal)

    def weight_groups(self):
        before = (
            WeightGroup("tokens", self.tokens_VE),
            WeightGroup("positions", self.positions),
        )
        return (*before, *self.stack.weight_groups(), WeightGroup("norm", self.norm))
