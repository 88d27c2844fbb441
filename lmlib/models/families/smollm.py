"""SmolLM 3 (Hugging Face 2025, "SmolLM3: smol, multilingual, long-context reasoner")."""

import functools
from collections.abc import Sequence

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.sizes import head_sizes
from lmlib.models.families.table_values import table_values
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary, Scaling
from lmlib.models.stack import segments
from lmlib.models.weights import compiled, fold, residual_scale


def smollm3(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float = 5_000_000.0,
    rope_scaling: Scaling | None = None,
    norm_epsilon: float = 1e-6,
    tied: bool = True,
    rotary_layers: Sequence[bool] | None = None,
    window: int | Sequence[int | None] | None = None,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """SmolLM 3: Llama with layers that have no rotary positions (NoPE: Yang et al. 2025,
    arXiv:2501.18795, §3). Arguments as in `llama`, and

    Args:
      rotary_layers: whether each layer has them; `None`: all but each fourth.
      window: positions that each one attends to in layers without them; `None`: all. Or one for
        each layer.

    Raises:
      ValueError: as `llama`, or if `rotary_layers` or `window` has not a value for each layer.
    """
    kv_heads, head_dim = head_sizes(
        embed, heads, kv_heads, head_dim, vocab=vocab, layers=layers, mlp=mlp
    )
    rotaries = all_but_each(4, layers) if rotary_layers is None else rotary_layers
    if window is None or isinstance(window, int):
        window = [None if has_them else window for has_them in rotaries]
    for name, values in {"rotary_layers": rotaries, "window": window}.items():
        if len(values) != layers:
            raise ValueError(f"{name} has {len(values)} values for {layers} layers")
    rotary, scale = Rotary(head_dim, rope_theta, rope_scaling), residual_scale(layers)
    deviation, last_scale = table_values(embed, tied)

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> RMSNorm:
        return RMSNorm(epsilon=norm_epsilon, initial=initial, embed=embed, key=key)

    def block(rotary: Rotary | None, window: int | None, key: PRNGKeyArray) -> Block:
        return Block(
            attention_norm=norm(fold(key, "attention_norm")),
            attention=Attention(
                embed, heads, kv_heads, head_dim, rotary, window,
                residual_scale=scale, key=fold(key, "attention"),
            ),
            mlp_norm=norm(fold(key, "mlp_norm")),
            mlp=GatedMLP(embed, mlp, residual_scale=scale, key=fold(key, "mlp")),
        )  # fmt: skip

    def model(key: PRNGKeyArray) -> Decoder:
        kinds = [*zip(rotaries, window, strict=True)]
        makers = {
            (has_them, window): functools.partial(block, rotary if has_them else None, window)
            for has_them, window in kinds
        }
        stack = segments([makers[kind] for kind in kinds])
        last = norm(fold(key, "norm"), last_scale)
        return Decoder(vocab, embed, stack, last, tied, embedding_deviation=deviation, key=key)

    return compiled(model)(key)


def all_but_each(period: int, layers: int) -> list[bool]:
    """False for each `period`-th layer."""
    return [(layer + 1) % period != 0 for layer in range(layers)]
