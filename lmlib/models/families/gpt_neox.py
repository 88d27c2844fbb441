"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023,
arXiv:2304.01373)."""

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block, ParallelBlock
from lmlib.models.decoder import Decoder
from lmlib.models.families.sizes import head_sizes, rotated_coordinates
from lmlib.models.families.table_values import tied_scale
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import MLP, Activation, gelu
from lmlib.models.parts.norms import LayerNorm
from lmlib.models.parts.rope import Rotary, Scaling
from lmlib.models.stack import segments
from lmlib.models.weights import compiled, fold, residual_scale


def gpt_neox(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int | None = None,
    rope_theta: float = 10_000.0,
    rope_scaling: Scaling | None = None,
    rotary_fraction: float = 0.25,
    norm_epsilon: float = 1e-5,
    tied: bool = False,
    parallel: bool = True,
    activation: Activation = gelu,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """GPT-NeoX (§2.1). Where it departs from Llama: attention and mlp side by side, LayerNorm,
    biases everywhere, no grouped heads, a share of each head's coordinates rotated, and gelu
    between two products. Arguments as in `llama`; `mlp` is 4 · embed by default.

    Args:
      parallel: whether attention and mlp are given the same residual stream, rather than the mlp
        one with what attention adds.
      activation: of the mlp.

    Raises:
      ValueError: naming sizes that do not fit each other.
    """
    mlp = 4 * embed if mlp is None else mlp
    _, head_dim = head_sizes(embed, heads, None, None, vocab=vocab, layers=layers, mlp=mlp)
    rotary = Rotary(rotated_coordinates(head_dim, rotary_fraction), rope_theta, rope_scaling)
    scale = residual_scale(layers)

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> LayerNorm:
        return LayerNorm(epsilon=norm_epsilon, initial=initial, embed=embed, key=key)

    def block(key: PRNGKeyArray) -> Block | ParallelBlock:
        return (ParallelBlock if parallel else Block)(
            attention_norm=norm(key),
            attention=Attention(
                embed, heads, heads, head_dim, rotary, bias=True, output_bias=True,
                residual_scale=scale, key=fold(key, "attention"),
            ),
            mlp_norm=norm(key),
            mlp=MLP(embed, mlp, activation, residual_scale=scale, key=fold(key, "mlp")),
        )  # fmt: skip

    def model(key: PRNGKeyArray) -> Decoder:
        deviation = 0.02 if tied else 1.0
        last = norm(key, tied_scale(embed, deviation) if tied else 1.0)
        stack = segments([block] * layers)
        return Decoder(vocab, embed, stack, last, tied, embedding_deviation=deviation, key=key)

    return compiled(model)(key)
