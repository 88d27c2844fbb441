"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", §2.3)."""

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.sizes import head_sizes
from lmlib.models.families.table_values import tied_scale
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.embedding import Positions
from lmlib.models.parts.mlp import MLP, gelu_tanh
from lmlib.models.parts.norms import LayerNorm
from lmlib.models.stack import segments
from lmlib.models.weights import compiled, fold, residual_scale


def gpt2(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int | None = None,
    positions: int = 1_024,
    norm_epsilon: float = 1e-5,
    tied: bool = True,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """GPT-2. Where it departs from Llama: learned positions, LayerNorm, biases everywhere, no
    grouped heads, and gelu between two products.

    Args:
      vocab, embed, layers, heads, mlp: sizes; `mlp` is 4 · embed by default.
      positions: the longest sequence.
      norm_epsilon: added to the variance in every norm.
      tied: one table embeds and unembeds.
      key: seed of the weights.

    Raises:
      ValueError: if a size is not positive, or `heads` does not divide `embed`.
    """
    mlp = 4 * embed if mlp is None else mlp
    _, head_dim = head_sizes(
        embed, heads, None, None, vocab=vocab, layers=layers, mlp=mlp, positions=positions
    )
    scale = residual_scale(layers)

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> LayerNorm:
        return LayerNorm(epsilon=norm_epsilon, initial=initial, embed=embed, key=key)

    def block(key: PRNGKeyArray) -> Block:
        return Block(
            attention_norm=norm(key),
            attention=Attention(
                embed, heads, heads, head_dim, bias=True, output_bias=True,
                residual_scale=scale, key=fold(key, "attention"),
            ),
            mlp_norm=norm(key),
            mlp=MLP(embed, mlp, gelu_tanh, residual_scale=scale, key=fold(key, "mlp")),
        )  # fmt: skip

    def model(key: PRNGKeyArray) -> Decoder:
        last = norm(key, tied_scale(embed, 0.02) if tied else 1.0)
        return Decoder(
            vocab, embed, segments([block] * layers), last, tied,
            embedding_deviation=0.02,
            positions=Positions(positions, embed, key=fold(key, "positions")),
            key=key,
        )  # fmt: skip

    return compiled(model)(key)
