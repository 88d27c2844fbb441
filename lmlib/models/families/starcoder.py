"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173)."""

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.sizes import head_sizes
from lmlib.models.families.table_values import tied_scale
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import MLP, gelu_tanh
from lmlib.models.parts.norms import LayerNorm
from lmlib.models.parts.rope import Rotary
from lmlib.models.stack import segments
from lmlib.models.weights import compiled, fold, residual_scale


def starcoder2(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int | None = None,
    kv_heads: int | None = None,
    rope_theta: float = 10_000.0,
    norm_epsilon: float = 1e-5,
    tied: bool = True,
    window: int | None = 4_096,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """StarCoder 2. Where it departs from Llama: LayerNorm, biases everywhere, a window, and gelu
    between two products. Arguments as in `llama`; `mlp` is 4 · embed by default."""
    mlp = 4 * embed if mlp is None else mlp
    kv_heads, head_dim = head_sizes(
        embed, heads, kv_heads, None, vocab=vocab, layers=layers, mlp=mlp
    )
    rotary, scale = Rotary(head_dim, rope_theta), residual_scale(layers)

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> LayerNorm:
        return LayerNorm(epsilon=norm_epsilon, initial=initial, embed=embed, key=key)

    def block(key: PRNGKeyArray) -> Block:
        return Block(
            attention_norm=norm(key),
            attention=Attention(
                embed, heads, kv_heads, head_dim, rotary, window, bias=True, output_bias=True,
                residual_scale=scale, key=fold(key, "attention"),
            ),
            mlp_norm=norm(key),
            mlp=MLP(embed, mlp, gelu_tanh, residual_scale=scale, key=fold(key, "mlp")),
        )  # fmt: skip

    def model(key: PRNGKeyArray) -> Decoder:
        stack = segments([block] * layers)
        last = norm(key, tied_scale(embed, 0.02) if tied else 1.0)
        return Decoder(vocab, embed, stack, last, tied, embedding_deviation=0.02, key=key)

    return compiled(model)(key)
